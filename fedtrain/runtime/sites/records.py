"""Where a site keeps what it must remember over all its runs: its ledger of privacy, and its cohort guard.

  runs/@cleveland/                 the records of the site
  certs/sites/cleveland/records    the path of that folder, from here; made by the site's first start

  runs/heart@cleveland/MARK        how long a file of the records was after the last line of this run

So a start with another run.dir finds the records of the starts before it: what bounds a site's data over all
runs can't be left behind by a changed setting. Where the folder of the key can't be written (a container has
it read-only), the records stay under run.dir, and the site says so.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from ...config import Config, SitePolicy
from ...errors import Damaged
from ...events import Emit, Notice, noticed
from ...store import Ledger
from ...store.disk import (
    Warn,
    private_folder,
    read_sealed,
    set_aside,
    sync_folder,
)

NOTE = "records"
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def ledger_of(config: Config, site: str, own: Path, policy: SitePolicy, emit: Emit) -> Ledger:
    """The site's ledger of this run, with its records. `own`: the folder of its key."""
    run = config.site_dir(site)
    return Ledger(run, noticed(emit), records_of(own, run, policy, emit))


def records_of(own: Path, run: Path, policy: SitePolicy, emit: Emit) -> Path:
    """The folder of a site's records; `own`: of its key, `run`: of its run. Damaged where it is gone, and the
    policy bounds what all runs may cost."""
    here, note = run.parent / f"@{run.name.rpartition('@')[2]}", own / NOTE
    try:
        found = Path(os.path.normpath(own.absolute() / note.read_text(encoding="utf-8").strip()))
    except (FileNotFoundError, NotADirectoryError):
        return _first(here, note, emit)
    except UnicodeDecodeError:
        raise Damaged(f"{note} is damaged: write the path of this site's records into it") from None
    if found.is_dir():
        return found
    gone = f"this site's records were in {found}, which is gone, as {note} says."
    if policy.epsilon:
        raise Damaged(
            f"{gone} What its runs gave away must not be forgotten (policy.epsilon): restore them from a "
            f"copy; or, where the folder was moved, write its path into that file."
        )
    emit(Notice(text=f"{gone} It begins new ones: what it let be opened before is forgotten."))
    note.unlink(missing_ok=True)
    return _first(here, note, emit)


def _first(here: Path, note: Path, emit: Emit) -> Path:
    """Use the records under run.dir, and remember for all later starts that they are there."""
    private_folder(here)
    sync_folder(here.parent)  # after a power cut no note names a folder that was never there
    partial = note.with_name(f".{NOTE}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(os.path.relpath(here.absolute(), note.parent.absolute()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, note)  # or another process of this site was faster
    except FileExistsError:
        pass
    except OSError as e:
        if e.errno not in READ_ONLY and not isinstance(e, FileNotFoundError):
            raise
        emit(Notice(
            text=f"{note.parent} can't be written: what bounds this site over all its runs holds as long as "
            f"run.dir stays what it is."
        ))  # fmt: skip
    finally:
        # On a read-only mount unlink() fails with EROFS even where there is no file.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return here


def check_length(file: Path, lines: int, run: Path, mark: str, remedy: str, warn: Warn) -> None:
    """Damaged where a run of this site noted more lines of this file of its records than it has. `run`: the
    folder of any of its runs; `remedy`: what to do then; `warn` hears of a note that is damaged."""
    for noted in run.parent.glob(f"?*@{run.name.rpartition('@')[2]}/{mark}"):
        try:
            least = read_sealed(noted, int)
        except Damaged as e:
            warn(f"{e} {set_aside(noted)}")
            continue
        if least > lines:
            raise Damaged(f"{file} has {lines} lines, and {noted.parent.name} noted {least}. {remedy}")
