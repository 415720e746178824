"""Gives decoders any bytes, led by what they reach in them: `python -m tests.fuzz [NAME...] [libFuzzer's
options]`; without a name, each decoder there is. What is found is kept as a file, and ends the command.

    python -m tests.fuzz "roster entry" -runs=5000000
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["fedtrain", "tomllib"]):
    from tests.decoders import Decoder, decoders

SEEDS = Path(__file__).parent / "fuzz_seeds"  # what is found goes here, and is tried first
LIMITS = ["-rss_limit_mb=2048", "-malloc_limit_mb=512", "-timeout=10", "-max_len=65536"]
MEMORY = Path("/dev/shm")


def one(name: str, decoder: Decoder, folder: Path, options: Sequence[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    read = decoder.bare or decoder.read

    def reads(data: bytes) -> None:
        with suppress(decoder.error):
            read(data)

    corpus, seeds = folder / "corpus", SEEDS / name.replace(" ", "-")
    corpus.mkdir()
    (corpus / "valid").write_bytes(decoder.valid)
    seeds.mkdir(parents=True, exist_ok=True)
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(each)}"\n' for each in decoder.words))
    known = [f"-dict={words}"] if decoder.words else []  # libFuzzer takes none without a word
    own = [*known, f"-artifact_prefix={seeds}/", *options]
    atheris.Setup(["fuzz", *LIMITS, *own, str(corpus), str(seeds)], reads)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def found(name: str, options: Sequence[str]) -> bool:
    """Whether a process of its own, which has all modules already, found something in the decoder."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        if not (process := os.fork()):
            one(name, decoders(Path(folder))[name], Path(folder), options)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0


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
