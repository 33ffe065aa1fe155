from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from heats.errors import ConfigError, TrackingError
from heats.tracking.registry import check_alias, check_model_name, connection


@pytest.mark.parametrize("alias", ["champion", "best-of_2", "v1a", "é"])
def test_alias_that_mlflow_takes_is_taken(alias: str) -> None:
    check_alias(alias)


@pytest.mark.parametrize("alias", ["", "latest", "Latest", "v1", "V22", "a b", "a/b", "a@b"])
def test_alias_that_mlflow_refuses_is_bad_input(alias: str) -> None:
    with pytest.raises(ConfigError, match="--alias="):
        check_alias(alias)


def test_bad_model_name_names_where_it_came_from() -> None:
    check_model_name("My model-2.1", "MODEL")
    with pytest.raises(ConfigError, match=r"promotion\.model='a/b'"):
        check_model_name("a/b", "promotion.model")


def test_connection_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with (
        pytest.raises(TrackingError, match="no MLflow store"),
        connection(f"sqlite:///{path}"),
    ):
        pass
    assert not path.exists()


def test_connection_shows_no_password_and_restores_the_tracking_uri() -> None:
    uri, before = "http://me:secret@localhost:1", mlflow.get_tracking_uri()

    def use() -> None:
        with connection(uri):
            assert mlflow.get_tracking_uri() == uri
            message = "it went away"
            raise MlflowException(message)

    with pytest.raises(TrackingError, match=r"http://me:\*{3}@localhost:1 .*went away") as error:
        use()
    assert "secret" not in str(error.value)
    assert mlflow.get_tracking_uri() == before
