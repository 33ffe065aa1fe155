from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from heats.errors import ConfigError
from heats.tracking.predictor import predictor_source, requirements


def test_source_of_a_predictor_is_found_without_importing_it() -> None:
    source = predictor_source("heats.recipes.digits_predictor")
    assert source.name == "digits_predictor.py"
    assert "set_model" in source.read_text()


@pytest.mark.parametrize("module", ["no_such_module", "heats.no_such", "math", "", "heats..x"])
def test_module_without_a_source_is_bad_input(module: str) -> None:
    with pytest.raises(ConfigError, match=r"promotion\.predictor="):
        predictor_source(module)


def test_imported_packages_are_pinned_without_a_local_label(tmp_path: Path) -> None:
    source = tmp_path / "predictor.py"
    source.write_text(
        "import json, numpy.linalg\n"
        "from mlflow.pyfunc import PythonModel\n"
        "from pathlib import Path\n"
        "def load():\n"
        "    import sklearn\n"
        "    import torch\n"
    )
    assert requirements(source) == [
        f"mlflow=={version('mlflow')}",
        f"numpy=={version('numpy')}",
        f"scikit-learn=={version('scikit-learn')}",
        f"torch=={version('torch').partition('+')[0]}",
    ]


def test_declared_packages_are_taken_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "predictor.py"
    source.write_text(
        "# /// script\n"
        '# requires-python = ">=3.11"\n'
        "# dependencies = [\n"
        '#   "torch>=2",\n'
        '#   "mine==1",\n'
        "# ]\n"
        "# ///\n"
        "import numpy\n"
    )
    assert requirements(source) == ["torch>=2", "mine==1"]


def test_predictor_that_does_not_parse_is_bad_input(tmp_path: Path) -> None:
    source = tmp_path / "predictor.py"
    source.write_text("def\n")
    with pytest.raises(ConfigError, match=r"predictor\.py cannot be read"):
        requirements(source)
