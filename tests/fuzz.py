"""Gives decoders any bytes, led by what they reach in them: `python -m tests.fuzz [NAME...] [libFuzzer's
options]`; without a name, each decoder there is. What reaches more, or is found, is kept in tests/seeds.zip.

    python -m tests.fuzz "roster entry" -runs=5000000
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

import atheris
import msgspec

with atheris.instrument_imports(include=["fedtrain", "tomllib"]):
    from tests.decoders import SEEDS, Decoder, decoders, names_of_seeds, seeds_of

ENDS = 256  # that reading may have: msgspec, in C, tells libFuzzer nothing of its branches, but its errors do
LIMITS = ["-rss_limit_mb=2048", "-malloc_limit_mb=512", "-timeout=10", "-max_len=65536"]
MEMORY = Path("/dev/shm")


def one(name: str, decoder: Decoder, folder: Path, options: Sequence[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    read = decoder.bare or decoder.read
    ends = [atheris._reserve_counter() for _ in range(ENDS)]

    def reads(data: bytes) -> None:
        end = ""
        try:
            read(data)
        except decoder.error as e:
            end = _kind(str(e))
        atheris._trace_branch(ends[zlib.crc32(end.encode()) % ENDS])

    corpus = folder / "corpus"
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(each)}"\n' for each in decoder.words))
    known = [f"-dict={words}"] if decoder.words else []  # libFuzzer takes none without a word
    own = [*known, f"-artifact_prefix={corpus}/", *options]
    atheris.Setup(["fuzz", *LIMITS, *own, str(corpus)], reads)
    atheris.Fuzz()


def _kind(error: str) -> str:
    """What an error says, without what it quotes of the bytes: how it begins, and the place in a message."""
    begins, place = " ".join(error.split()[:5]), re.search(r"`\$[^`]*`", error)
    return re.sub(r"'.*|\d+|[^ -~]+", "", begins) + (place[0] if place else "")


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def found(name: str, options: Sequence[str]) -> bool:
    """Whether a process of its own, which has all modules already, found something in the decoder."""
    folder = Path(
        mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)
    )  # that process would clear up another kind
    try:
        decoder, corpus = decoders(folder)[name], folder / "corpus"
        corpus.mkdir()
        for at, seed in enumerate([decoder.valid, *seeds_of(name)]):
            (corpus / f"{at}").write_bytes(seed)
        if not (process := os.fork()):
            one(name, decoder, folder, options)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        keep(name, {path.read_bytes() for path in corpus.iterdir()} - {decoder.valid})
        return code != 0
    finally:
        shutil.rmtree(folder)


def keep(name: str, seeds: set[bytes]) -> None:
    """Put these in the place of the decoder's seeds. libFuzzer has taken out what another one stands for."""
    others = {other: seeds_of(other) for other in names_of_seeds() if other != name}
    with ZipFile(SEEDS, "w", ZIP_LZMA) as file:
        for other, theirs in sorted({**others, name: sorted(seeds)}.items()):
            file.writestr(ZipInfo(other), msgspec.msgpack.encode(theirs), ZIP_LZMA)


def main() -> None:
    options = [each for each in sys.argv[1:] if each.startswith("-")]
    names = [each for each in sys.argv[1:] if not each.startswith("-")]
    with TemporaryDirectory() as folder:
        names = names or [*decoders(Path(folder))]
    bad = []
    for name in names:
        print(f"--- {name}", flush=True)
        if found(name, options):
            bad.append(name)
    sys.exit(f"found something in: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
