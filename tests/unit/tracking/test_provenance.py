from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from heats.tracking.provenance import (
    MAX_DIFF_BYTES,
    Provenance,
    is_secret_key,
    provenance,
    redact_text,
    redact_value,
)

if TYPE_CHECKING:
    from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    (tmp_path / "sweep.py").write_text("lr = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_a_clean_repository_gives_commit_and_branch(repository: Path) -> None:
    found = provenance(repository, "sweep.py")
    assert (found.commit, found.branch) == (git(repository, "rev-parse", "HEAD"), "main")
    assert found.is_dirty is False
    assert found.diff == ""
    assert found.packages["mlflow"]


def test_a_changed_file_gives_a_redacted_diff_that_is_bounded(repository: Path) -> None:
    (repository / "sweep.py").write_text("lr = 2\napi_key = 'sk-12'\n" + "x = 1\n" * 300_000)
    found = provenance(repository / "sub", str(repository / "sweep.py"))
    assert found.is_dirty is True
    assert "-lr = 1\n+lr = 2\n" in found.diff
    assert "+api_key = ***" in found.diff
    assert len(found.diff) < MAX_DIFF_BYTES + 100
    assert found.diff.endswith("bytes")


def test_outside_a_repository_nothing_of_git_is_known(tmp_path: Path) -> None:
    found = provenance(tmp_path, None)
    assert (found.commit, found.branch, found.is_dirty, found.diff) == (None, None, None, "")
    found.save(tmp_path / "p.json")
    assert Provenance.load(tmp_path / "p.json") == found
    assert Provenance.load(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "key",
    ["password", "db.PASSWORD", "hf_token", "token", "apiKey", "OPENAI_API_KEY", "clientSecret",
     "aws_secret_access_key", "a.credentials", "wandb.api_key", "ssh-private-key", "apikey"],
)  # fmt: skip
def test_a_secret_is_known_by_its_key(key: str) -> None:
    assert is_secret_key(key)
    assert redact_value(key, "hunter2") == "***"


@pytest.mark.parametrize(
    "key",
    ["tokenizer", "max_tokens", "pad_token", "eos_token", "keyboard", "key", "num_tokens", "lr",
     "secretary", "monkey"],
)  # fmt: skip
def test_a_setting_of_a_model_is_no_secret(key: str) -> None:
    assert not is_secret_key(key)


def test_text_keeps_everything_but_its_secrets() -> None:
    text = """\
lr: 0.1
db: {user: me, password: "a, b", port: 5}
hub:
  token: my pass # word
  private_key: |
    -----BEGIN
    abc
  url: https://me:hunter2@host/x
+opt.api_key=abc
note: uses ghp_0123456789abcdefABCDEF
tokenizer: gpt2
"""
    assert (
        redact_text(text)
        == """\
lr: 0.1
db: {user: me, password: ***, port: 5}
hub:
  token: ***
  private_key: ***
  url: https://me:***@host/x
+opt.api_key=***
note: uses ***
tokenizer: gpt2
"""
    )
