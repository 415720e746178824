"""Every error that fedtrain raises on purpose.

FedtrainError
  ConfigError        the user's files, flags or task; the message says what to change
    NotApproved      the site's people have not approved the task as it is
  StoreError         the run's directory is on a network disk, or in use, or its disk is full
    Damaged          a file of the run's directory does not hold the bytes that were written to it
    Unreadable       the disk, or this process, can't read or write just now; what is there is not to blame
    Forgotten        a site's memory of its training is lost or damaged; the round goes on without the site
  ForgedSum          the aggregator shows a site what is not the sum of what the sites sent
  CertificateError   a certificate or key is missing, expired, or of the wrong role
    CertificateRevoked its holder needs a new one
    NotPinned        its holder is not among those whom this site's policy lets in; people can pin it
  ConnectError       the other end cannot be reached, or refuses the connection; the message says why
    JoinRefused      aggregator and site do not agree on task, model, config or version
  TaskError          the user's task raised an error; has its type and place in the code, never its data
  RoundError         a round could not be finished; the global weights are unchanged
    TooFewSites      fewer valid replies than min_sites
      SiteMissing    the aggregation rule can't decide without a certain site's update, and there is none
      Unfinished     too few for a secure sum; names sites that dropped out, and senders of bad messages
    SecAggError      a secure sum can't be computed, or its result is not valid
    Diverged         the new model is not finite, or too large to be trained further
  BadUpdate          one site's update was refused, and the site named; the round goes on with the others
  WireError          bytes that do not follow the protocol: unknown frame, wrong size, wrong digest
    Broken           a transfer ended early, or its stored part is damaged; a second try may succeed
"""

import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType

SHOWN = 2  # calls shown at each end of a traceback


class FedtrainError(Exception):
    """Base of every error that fedtrain raises on purpose."""


class ErrorTranslation(AbstractContextManager[None]):
    """Raises another error in place of one that the block raised. `translate` returns it, or None.

    A class, for in Python 3.12 a generator (contextlib.contextmanager) that does so keeps the first error
    with the tensors of all its frames until the garbage collector runs: after "out of memory", for long.
    """

    def __init__(self, translate: Callable[[Exception], Exception | None]) -> None:
        self.translate = translate

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        other = self.translate(error) if isinstance(error, Exception) else None
        try:
            if other is not None:
                raise other from error
        finally:
            del other  # its traceback has this frame: else a cycle


def story_of(error: BaseException) -> str:
    """The traceback of an error of the user's code, from the first call in that code on, without the middle
    of a long one; "" for a FedtrainError without a cause, whose message says everything."""
    while isinstance(error, FedtrainError):
        if error.__cause__ is None:
            return ""
        error = error.__cause__
    ours, trace = str(Path(__file__).parent), error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (file.startswith(ours) or "site-packages" in file or "importlib" in file):
            break
        trace = trace.tb_next
    calls = traceback.format_list(traceback.extract_tb(trace or error.__traceback__))
    if left_out := max(0, len(calls) - 2 * SHOWN):
        calls[SHOWN:-SHOWN] = [f"  … {left_out} more\n"]
    last = traceback.format_exception_only(error)
    before = f"{story_of(error.__cause__)}which was the cause of\n" if error.__cause__ else ""
    return "".join([before, "Traceback (most recent call last):\n", *calls, *last])


def reason_of(error: BaseException) -> str:
    """One line about an error for the other end: our own message, that memory is lacking, or the type and
    place of a foreign error, whose message may quote data."""
    if isinstance(error, FedtrainError):
        return str(error)
    if out_of_memory(error):
        return "out of memory"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had: of the machine, or of a GPU."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    torch = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    return type(error).__name__ == "OutOfMemoryError" or (isinstance(error, RuntimeError) and torch)


class ConfigError(FedtrainError):
    """The user's configuration, flags or task file; the message says what to change."""


class NotApproved(ConfigError):
    """The site's people have not approved the task as it is now."""


class StoreError(FedtrainError):
    """The run directory cannot be used as it is."""


class Damaged(StoreError):
    """A file does not hold the bytes that were written to it."""


class Unreadable(StoreError):
    """A call of the operating system failed: a full or broken disk, too many open files, no permission."""


class Forgotten(StoreError):
    """A site's memory of its training is lost or damaged; other sites go on."""


class ForgedSum(FedtrainError):
    """What the aggregator shows as a sum, or makes of it, is not what the sites sent; the site stops."""

    def __init__(self, aggregator: str, round: int, why: str) -> None:
        super().__init__(
            f"round {round}: {aggregator} shows a sum that is not what its sites sent: {why}. This site "
            f"stops, and sends nothing more. Either the aggregator lies, or a site of that sum sent a "
            f"wrong checksum: ask the other sites what they see before anybody goes on."
        )


class CertificateError(FedtrainError):
    """A certificate or key is missing, expired, or issued for another role or name."""


class CertificateRevoked(CertificateError):
    """A certificate, or the issuing CA above it, is on a list of the revoked."""


class NotPinned(CertificateError):
    """A certificate that counts, of a site that this one's policy doesn't let in. `pin`: NAME=KEY, which
    would."""

    def __init__(self, site: str, key: str) -> None:
        self.site, self.pin = site, f"{site}={key}"
        super().__init__(
            f"{site} is not pinned here with its key (policy.pin_members). If `fedtrain policy show` says so "
            f"there, run here: fedtrain policy pin {self.pin}, which counts within seconds, without a restart"
        )


class ConnectError(FedtrainError):
    """The other end cannot be reached, or refuses the connection; the message is one line for a person."""


class JoinRefused(ConnectError):
    """Both ends are connected, but their tasks or settings differ; another attempt changes nothing."""


class TaskError(FedtrainError):
    """The user's task raised an error while loading, training or evaluating. `openly`: the same with the
    error's own message, which may quote data: it is shown where the data is, and never sent to others."""

    def __init__(self, text: str, openly: str = "") -> None:
        super().__init__(text)
        self.openly = openly or text


@contextmanager
def openly() -> Iterator[None]:
    """Work on a machine that has all the data: a TaskError says all that it knows."""
    try:
        yield
    except TaskError as e:
        e.args = (e.openly,)
        raise


class RoundError(FedtrainError):
    """A round could not be finished; the global weights are unchanged."""


LESS = "Lower strategy.min_sites, raise strategy.round_deadline, or start more sites."
GOES_ON = "the same command goes on"


def mend(reasons: Mapping[str, str]) -> str:
    """What to do about sites that failed; "" where a reason says so itself: fewer sites mend no disk."""
    if any(GOES_ON in reason for reason in reasons.values()):
        return ""
    own = sorted({key for reason in reasons.values() for key in re.findall(r"\(its own ([\w.]+)", reason)})
    what = f"Change {some(own)} at these sites, and start them again" if own else "Mend that"
    return f"{what}, or lower strategy.min_sites; {GOES_ON} from the last round."


def grouped(reasons: Mapping[str, str]) -> str:
    """Sentences from {site: reason}: each reason once, with its sites; the first three reasons."""
    sites_of: dict[str, list[str]] = {}
    for site in sorted(reasons):
        own = rf"site {re.escape(site)}[,:] |{re.escape(repr(site))}"  # the site in a TaskError
        sites_of.setdefault(re.sub(own, "", reasons[site]), []).append(site)
    lines = [
        f"{some(sites)}: {(reasons[sites[0]] if len(sites) == 1 else reason).rstrip('.')}."
        for reason, sites in sites_of.items()
    ]
    return " ".join(lines[:3])


def some(sites: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    return ", ".join(sites[:5]) + (f" and {len(sites) - 5:,} more" if len(sites) > 5 else "")


class TooFewSites(RoundError):
    """Fewer valid replies than a round needs."""

    def __init__(
        self,
        stage: str,
        have: int,
        need: int,
        failed: Mapping[str, str] = MappingProxyType({}),
        silent: Sequence[str] = (),
    ) -> None:
        """`failed`: site -> why its reply can't be used; `silent`: the sites that did not reply in time."""
        if not failed:
            what = f"{have} sites replied, {need} are needed."
        else:
            asked = have + len(failed) + len(silent)
            what = f"{have} of {asked} sites gave what can be used, {need} are needed. {grouped(failed)}"
        if failed and silent:
            what += f" No reply in time: {some(silent)}."
        self.told = bool(failed) and not silent  # whether all that are lacking said why
        super().__init__(f"{stage}: {what} {mend(failed) if self.told else LESS}".rstrip())
        self.have, self.need = have, need


class SiteMissing(TooFewSites):
    """A site without whose update the aggregation rule can't decide gave none that can be used."""

    def __init__(self, stage: str, site: str, reason: str = "") -> None:
        """`reason`: why the site's reply can't be used; "" where none came in time."""
        why = reason.rstrip(".") or "no reply in time"
        Exception.__init__(self, f"{stage}: the rule needs the update of {site}: {why}. See to that site.")
        self.have, self.need, self.told = 0, 1, bool(reason)


class Unfinished(TooFewSites):
    """A secure sum was not opened: too few sites, or too few valid shares. Nothing was learnt."""

    def __init__(
        self,
        what: str,
        have: int,
        need: int,
        *,
        dropped: Mapping[str, str],
        blamed: Mapping[str, str],
        survivors: Sequence[str] = (),
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """`dropped`: site -> the step at which it dropped out; `blamed`: site -> its invalid message;
        `survivors`: the sites whose sum may have been opened; `failed`: site -> its own account of why."""
        known = {**(failed or {}), **blamed}
        super().__init__("secure sum", have, need, known)
        self.told = bool(known) and known.keys() >= dropped.keys()
        if blamed or not self.told:
            where, why = f"secure sum, {what}: {have}, and {need} are needed.", {**dropped, **blamed}
            mended = mend(known) if self.told else LESS
            self.args = (" ".join(filter(None, (where, grouped(why), mended))),)
        self.survivors = tuple(survivors)
        self.dropped, self.blamed, self.failed = dict(dropped), dict(blamed), dict(failed or {})


class SecAggError(RoundError):
    """A secure sum can't be computed, or its result is not valid; nothing was learnt."""


class Diverged(RoundError):
    """The new model of a round is not finite, or too large to be trained further; it is not committed."""

    def __init__(self, problem: str, sizes: Mapping[str, float], outliers: Sequence[str] = ()) -> None:
        """`sizes`: site -> its update's norm times its weight; {} where single updates are hidden.

        The `culprits` are the `outliers`, where these are known; else the site whose update is larger than
        all others together, if there is one.
        """
        self.culprits = sorted(outliers, key=lambda site: -sizes[site])
        largest = max(sizes, key=sizes.__getitem__, default="")
        others = sum(size for site, size in sizes.items() if site != largest)
        if len(sizes) > 1 and sizes[largest] > others and self.culprits in ([], [largest]):
            self.culprits = [largest]
            times = f"{sizes[largest] / others:.3g} times" if others else "infinitely"
            why = f"{largest}'s update is {times} as large as all others together"
        elif self.culprits:
            why = f"the updates of {some(self.culprits)} are far larger than most"
        elif sizes:
            why = (
                "no site's update outweighs the others', so training itself diverges: lower train.lr or the "
                "strategy's server_lr, or set train.clip_norm"
            )
        else:
            why = (
                "whose update it was can't be known under masks: lower secagg.clip, train.lr or the "
                "strategy's server_lr; with secagg.enabled = false the site would be named"
            )
        super().__init__(f"the new model is of no use and is not committed: {problem}; {why}.")


class BadUpdate(FedtrainError):
    """One site's update cannot be used. It is quarantined, the site named, and the round goes on."""


class WireError(FedtrainError):
    """Bytes that do not follow the protocol."""


class Broken(WireError):
    """A transfer ended early, or its stored part was damaged; the transfer is tried again."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a path: write() on a full disk doesn't name the file."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = str(path)
        raise


def not_installed(module: str) -> ConfigError:
    """The error for a package without which fedtrain can't do this."""
    package, pip = module.partition(".")[0], f"{sys.executable} -m pip install"
    return ConfigError(f"the package {package} is not installed here. Install it: {pip} {package}")


def nearest(name: str, there: Iterable[str], *, most: int = 10) -> str:
    """A sentence to append to a message: " Did you mean X?", or the first `most` of the existing names."""
    import difflib  # here, because it takes as long to load as the rest of this file

    known = sorted(there)
    if near := difflib.get_close_matches(name, known, n=1):
        return f" Did you mean {near[0]}?"
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f" Found here: {', '.join(known[:most])}{more}." if known else ""
