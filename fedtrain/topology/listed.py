"""A graph from a file, one edge a line:

    # a comment
    berlin paris
    paris -> rome

The first edge goes both ways, the second one way. The names are peers; `fedtrain topology -n` names its peers
by numbers, 0 first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..exchange import PeerId
from .mixing import Out


def read(path: Path) -> list[tuple[PeerId, PeerId]]:
    """Every directed edge as (sender, receiver); ConfigError for an unreadable file or a wrong line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"topology: file:{path} can't be read: {e}") from None
    edges = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+(->\s+)?(\S+)", line)
        if match is None or match[1] == match[3]:
            raise ConfigError(f'topology: {path}:{number}: {line!r} is no edge. Write "a b" or "a -> b".')
        edges += [(match[1], match[3])] if match[2] else [(match[1], match[3]), (match[3], match[1])]
    return edges


def listed(members: Sequence[PeerId], path: Path) -> Out:
    """The graph in the file, without peers that are not members."""
    index = {name: i for i, name in enumerate(members)}
    out: list[set[int]] = [set() for _ in members]
    for sender, receiver in read(path):
        if sender in index and receiver in index:
            out[index[sender]].add(index[receiver])
    return [sorted(peers) for peers in out]
