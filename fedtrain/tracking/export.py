"""A round's model as files that need no fedtrain: safetensors, and what it is in words and in JSON.

    model.safetensors   every tensor under its state_dict name
    model.json          round, sites, digests, metrics, the SHA-256 of model.safetensors
    MODEL_CARD.md       the same for a reader
    evaluation.json     beside them, or in the run directory: what `fedtrain evaluate` found

The same round gives the same bytes, each time. Tied weights stand once, under their first name, as
`safetensors.torch.load_model(model, "model.safetensors")` expects.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import __version__
from ..arena import Arena
from ..digest import settings_digest
from ..errors import Damaged, StoreError, some, writing
from ..events import Averages
from ..schema import Schema
from ..store import AGREED, RunStore
from ..store.rounds import NOISE
from .live import number

MODEL, EVALUATION = "model.safetensors", "evaluation.json"
NOISES = {  # by where it was added
    "site": "Each update was shortened to the norm {clip:g}, and Gaussian noise of {noise_multiplier:g} "
    "times that was added to it at its site.",
    "example": "In each optimizer step at a site the gradient of each example was shortened to the norm "
    "{clip:g}, and Gaussian noise of {noise_multiplier:g} times that was added to their sum (DP-SGD).",
    "sum": "Updates were shortened to the norm {clip:g}, and the sites added discrete Gaussian noise of "
    "{noise_multiplier:g} times that, each a part of it, to their sums under masks.",
    "server": "Gaussian noise was added to each sum of updates at the server: its standard deviation is "
    "{sigma:g} times what one site can change.",
}
COST = "It cost epsilon = {epsilon:.4g} at delta = {delta:g}, of "
COSTS = {  # by who knows it
    "simulation": "the site that gave away most. But the noise of a simulation comes from `run.seed`, and "
    "protects nobody.",
    "peer": "the peer that wrote this, over all its runs. Other peers decide on their noise by themselves, "
    "and their own logs say what it cost.",
    "server": "a site that took part in every round.",
    "rounds": "a site that took part in every round. Attempts that failed, and other runs, cost more: that "
    "is in each site's own log (`privacy_spent`).",
}
FORMAT = {"format": "pt"}  # what the file says of itself
PEER = "+gossip@"  # between the run's name and the peer's, in the name of its run directory
SPLITS = {"test_data": "test", "eval_data": "evaluation", "data": "training"}  # by the task's method


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model on test data; evaluation.json as it stands here."""

    run: str
    round: int | None  # None of a file that doesn't say
    weights_digest: str | None
    data: Literal["test_data", "eval_data", "data"]  # the task's method that gave it
    metrics: Averages
    by_site: dict[str, Averages]
    fedtrain: str  # version
    own_models: bool = False  # each site's own model was measured, on the site's own data


def export(run_dir: Path, out: Path, round: int | Literal["best"] | None = None) -> Path:
    """Write the model of a round (None: the last) into the folder `out`, and return it.

    Each file appears whole; a program that waits for model.json finds the other two there.
    """
    with closing(RunStore(run_dir, read_only=True)) as store:
        chosen = _choose(store, round)
        rows = [r for r in store.rounds() if r.round <= chosen]
        meta, sites, checkpoint = store.meta(), sorted(store.joined()), store.load(chosen)
        weights = checkpoint.weights
        frozen = store.load_frozen()
    assert isinstance(weights, Arena), "a loaded round is in memory"
    row, noise = rows[-1], next((r.record[NOISE] for r in reversed(rows) if NOISE in r.record), None)
    run, of_a_peer, peer = run_dir.name.partition(PEER)
    models = row.record.get("models")  # where peers agreed on one
    agreed: dict[str, str] = meta.get("agreed", {})
    about = {
        "run": meta.get("run", run),
        "round": chosen,
        "best": row.best,
        # names, of all that joined; of peers, those whose models are in the one of all
        "sites": sites if models is None else row.record.get("of", []),
        "updates": row.record.get("sites") if models is None else models,  # how many are in this round
        **({"peer": peer} if of_a_peer else {}),  # whose export this is, and whose data the metrics are of
        **({"agreed": True} if models is not None else {}),  # it is the one model of peers
        **_own_model(checkpoint.state),
        "metrics": row.metrics or {},
        "training_loss": row.record.get("loss"),
        **({"clock_s": row.record["clock_s"]} if "clock_s" in row.record else {}),  # of a simulation
        "parameters": weights.schema.numel + frozen.schema.numel,
        "frozen": frozen.schema.numel,  # of them
        "local": meta.get("local", []),  # names of the tensors that stay at their site, and are not here
        "task_digest": meta.get("task_digest"),
        "schema_digest": weights.schema.digest,
        "weights_digest": weights.digest,
        "frozen_digest": store.frozen.digest or None,
        **({"noise": noise} if noise else {}),
    }
    return write(out, weights.views() | frozen.views(), about, agreed, _evaluated(run_dir))


def _own_model(state: Mapping[str, object]) -> dict[str, str]:
    """Whose own a peer's model is, where it is not one that all peers have agreed on."""
    peers = [key.removesuffix("/model") for key in state if key.endswith("/model")]
    return {"own_model_of": peers[0]} if len(peers) == 1 and AGREED not in state else {}


def write(
    out: Path, tensors: dict[str, Any], about: dict[str, Any], agreed: Mapping[str, str],
    evaluated: EvaluationReport | None = None,
) -> Path:  # fmt: skip
    """Write a model, what is known of it and the settings it was trained with into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    about = {
        **about,
        "config": {key: _value(text) for key, text in agreed.items()},
        "config_digest": settings_digest(agreed),
        "sha256": _replace(out / MODEL, lambda path: _save(path, tensors)),
        "fedtrain": __version__,
    }
    _describe(out, about, evaluated)
    # safetensors makes a file of mode 0600, whatever the umask
    (out / MODEL).chmod((out / "model.json").stat().st_mode & 0o777)
    return out


def _describe(folder: Path, about: dict[str, Any], evaluated: EvaluationReport | None) -> None:
    """Write the card and model.json of an export, with the evaluation on test data if it is of this model."""
    if evaluated is not None and evaluated.weights_digest == about.get("weights_digest"):
        about["test"] = {"data": evaluated.data, "metrics": evaluated.metrics, "sites": [*evaluated.by_site]}
    _replace(folder / "MODEL_CARD.md", lambda path: path.write_text(_card(about), encoding="utf-8"))
    _replace(folder / "model.json", lambda path: path.write_bytes(_pretty(about)))


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _evaluated(folder: Path) -> EvaluationReport | None:
    try:
        return msgspec.json.decode((folder / EVALUATION).read_bytes(), type=EvaluationReport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def keep_evaluated(source: Path, evaluated: EvaluationReport) -> None:
    """Write an evaluation down beside the model, a run directory or an export, and in the model's card. In a
    folder that can't be written it is not kept, and a line on stderr says so."""
    folder = source if source.is_dir() else source.parent
    if not os.access(folder, os.W_OK):
        return print(f"{folder} can't be written: this evaluation is not kept there.", file=sys.stderr)
    _replace(folder / EVALUATION, lambda path: path.write_bytes(_pretty(evaluated)))
    for each in (folder, folder / "model"):
        if (each / "model.json").exists():
            _describe(each, msgspec.json.decode((each / "model.json").read_bytes()), evaluated)


def model_of(source: Path, round: int | Literal["best"] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's tensors by name, and what is known of it: of a run directory's last round, or of `round`; or
    an export's."""
    if (source / "run.db").exists():
        with closing(RunStore(source, read_only=True)) as store:
            chosen = _choose(store, round)
            weights, frozen = store.load(chosen).weights.load(), store.load_frozen()
            about = {"run": source.name, "round": chosen, "weights_digest": weights.digest}
            about["local"] = store.meta().get("local", [])
            return weights.views() | frozen.views(), about
    if round is not None:
        raise StoreError(f"{source} is no run directory: it has one model. Leave --round out.")
    if source.is_dir() and not (source / MODEL).exists():
        raise StoreError(
            f"{source} holds no model. Name a run that has one (an aggregator's, a simulation's, a peer's), "
            f"or what `fedtrain export` wrote."
        )
    file = source / MODEL if source.is_dir() else source
    tensors, about = _read(file), {"run": file.stem, "round": None, "weights_digest": None}
    if (known := file.with_name("model.json")).exists():
        about |= msgspec.json.decode(known.read_bytes())
    return tensors, about


def completed(
    source: Path, tensors: dict[str, Any], about: dict[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """The model of `model_of`, with the task's `own` values for what stays at the sites, of which stderr is
    told."""
    if not (missing := [name for name in about.get("local", ()) if name not in tensors]):
        return tensors
    print(f"{staying(source, missing)} The task's own initial values take their place.", file=sys.stderr)
    return tensors | {name: own[name] for name in missing if name in own}


def staying(source: Path, names: list[str]) -> str:
    """What to tell of tensors that a model lacks because they stay at the sites."""
    return (
        f"{source.name} does not have {some(names)}: they stay at the sites. `fedtrain export {source.name} "
        f"--site NAME` writes a site's own model."
    )


def own_models(source: Path, round: int | Literal["best"] | None) -> dict[str, dict[str, Any]]:
    """The tensors of each one's own model, by its name, where a run keeps several: of peers that were
    simulated together; {} of any other run, and of an export."""
    if not (source / "run.db").exists():
        return {}
    with closing(RunStore(source, read_only=True)) as store:
        checkpoint, frozen = store.load(_choose(store, round)), store.load_frozen().views()
    state, schema = checkpoint.state, checkpoint.weights.schema
    names = [key.removesuffix("/gauge") for key in state if key.endswith("/gauge")]  # as Peer.kept says
    if len(names) < 2:
        return {}
    return {name: Arena(schema, state[f"{name}/model"]).views() | frozen for name in sorted(names)}


def beginning(source: Path, schema: Schema, frozen: Schema) -> tuple[Arena, Arena]:
    """The model that a new run begins with, and its frozen parameters: the last one of a run directory, or an
    export (its folder, or its model.safetensors). StoreError unless it is a model of these schemas; what of
    it is frozen may differ."""
    tensors, about = model_of(source, None)
    wanted = {spec.name for spec in schema.tensors} - tensors.keys()
    if lacking := [name for name in about.get("local", ()) if name in wanted]:
        raise StoreError(f"{staying(source, lacking)} Begin with that, or leave them at the sites here too.")
    return filled(source, tensors, schema, frozen)


def _read(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        _check(file)
        return load_file(file)
    except FileNotFoundError:
        raise StoreError(f"{file} does not exist. Name a run, or what `fedtrain export` wrote.") from None
    except SafetensorError as e:
        raise StoreError(f"{file} is not a safetensors file: {e}.") from None


def _check(file: Path) -> None:
    """Damaged unless an export is what its model.json says; a file without one is anybody's."""
    about = file.with_name("model.json")
    if file.name != MODEL or not about.exists():
        return
    with file.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    try:
        expected = msgspec.json.decode(about.read_bytes(), type=dict).get("sha256")
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise Damaged(f"{about} is damaged: {e}. Export the model again, or remove this file.") from None
    if digest != expected:
        raise Damaged(
            f"{file} is damaged: its SHA-256 is not the one in {about.name}. Export it again; or remove "
            f"{about.name}, when it is to be another model."
        )


def filled(source: Path, tensors: dict[str, Any], schema: Schema, frozen: Schema) -> tuple[Arena, Arena]:
    """Arenas of these schemas with the tensors of their names; StoreError unless these are all there is."""
    weights, rest = Arena.zeros(schema), Arena.zeros(frozen)
    views = weights.views() | rest.views()
    if odd := sorted(views.keys() ^ tensors.keys()):
        where = "has no" if odd[0] in views else "has a"
        raise StoreError(f"{source} holds another model: it {where} {odd[0]}.")
    for name, view in views.items():
        found = tensors[name]
        if found.shape != view.shape or found.dtype != view.dtype:
            raise StoreError(
                f"{source} holds another model: {name} is {found.dtype}{list(found.shape)} there, "
                f"{view.dtype}{list(view.shape)} here."
            )
        view.copy_(found.detach())  # it may be a parameter of the task's own
    return weights, rest


def _choose(store: RunStore, round: int | Literal["best"] | None) -> int:
    if round == "best":
        if store.best_round is None:
            raise StoreError(
                f"{store.folder} has no best round: no evaluation gave evaluate.metric's metric. "
                f"Export the last round without --round."
            )
        return store.best_round
    done = [r.round for r in store.rounds()]
    if not done or (done == [0] and round is None):  # round 0 is the untrained model
        raise StoreError(f"{store.folder} has no model yet. Let the run finish its first round.")
    if round is not None and round not in done:
        raise StoreError(f"{store.folder} has no round {round}; its last one is {done[-1]}.")
    return done[-1] if round is None else round


def sha256_of_model(tensors: dict[str, Any]) -> str:
    """The SHA-256 that model.safetensors with these tensors has, wherever it is written."""
    from safetensors.torch import save

    return hashlib.sha256(save(tensors, metadata=FORMAT)).hexdigest()


def _save(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=FORMAT)
    except SafetensorError as e:  # a full disk too
        raise StoreError(f"{path.parent}: the model can't be written there: {e}.") from None


def _replace(path: Path, write: Callable[[Path], object]) -> str:
    """Let `write` make the file beside its place, put it there in one step; returns its SHA-256."""
    partial = path.with_name(f".{path.name}.new")
    with writing(path):
        write(partial)
        with partial.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
            os.fsync(f.fileno())
    partial.replace(path)
    return digest


def _card(about: dict[str, Any]) -> str:
    best = ", the best by its evaluation" if about["best"] else ""
    names = ", ".join(about["sites"])
    local = ", ".join(f"`{name}`" for name in about.get("local", ()))
    local = f"\nThese stay at the sites; load the rest with `strict=False`: {local}.\n" * bool(local)
    test = about.get("test")
    on_test = (
        f"""
## On the {SPLITS[test["data"]]} data of {", ".join(test["sites"])}

{_table("metric", "value", {k: number(v) for k, v in test["metrics"].items()})}
"""
        if test
        else ""
    )
    return f"""# {about["run"]}, round {about["round"]}

Trained with fedtrain {about["fedtrain"]}: round {about["round"]}{best}; {_origin(about)}.
{about["parameters"]:,} parameters and buffer values. The training data stayed at the sites{
        ": " * bool(names)
    }{names}.
{local}
## Evaluation {"at " + about["peer"] + ", on its own data" if "peer" in about else "at the sites"}

{_table("metric", "value", {k: number(v) for k, v in about["metrics"].items()})}
{on_test}{_noise_told(about)}
## Load it

```python
from safetensors.torch import load_model

model = ...  # what the task's model() returns
load_model(model, "model.safetensors")
```

## What it was trained with

{_table("setting", "value", {k: f"`{_json(v)}`" for k, v in about["config"].items()})}

{
        _table(
            "SHA-256 of",
            "",
            {
                "model.safetensors": f"`{about['sha256']}`",
                "config": f"`{about['config_digest']}`",
                "task code": f"`{about.get('task_digest')}`",
                "model schema": f"`{about.get('schema_digest')}`",
            },
        )
    }
"""


def _noise_told(about: dict[str, Any]) -> str:
    """The card's part on the noise in the model, and on what it cost, as far as the writer knows."""
    noise = about.get("noise")
    if not noise:
        return ""
    if "sites" in noise:  # elsewhere, by their own word
        others = f" The updates of {', '.join(noise['others'])} had none." if noise["others"] else ""
        return (
            f"\n## Noise\n\nThese sites said, as they joined, that they add noise of their own to all that "
            f"leaves them: {', '.join(noise['sites'])}. Which, and the epsilon that it cost, is in the log "
            f"of each (`privacy_spent`).{others}\n"
        )
    added = NOISES["example" if noise["unit"] == "example" else noise["where"]].format_map(noise)
    whose = "any single example" if noise["unit"] == "example" else "all data of one site"
    unknown = "What it cost is not known here."
    cost = COST.format_map(noise) + COSTS[noise["by"]] if "epsilon" in noise else unknown
    return f"\n## Noise\n\n{added} It is differential privacy of {whose}. {cost}\n"


def _origin(about: dict[str, Any]) -> str:
    """What a round's model was made of, in words."""
    count, rule = about.get("updates"), about["config"].get("gossip.rule", "mean")
    if about.get("agreed"):
        made = "the mean" if rule == "mean" else f"what {rule} makes"
        return f"the one model of all at the end, {made} of {count or 'the'} peers' models"
    if "site" in about:
        return f"{about['site']}'s own model"
    if not about["round"]:
        return "untrained"
    if "peer" in about:
        own = f"{about['peer']}'s own model, which no other peer has"
        return f"{own}, averaged in this round over {count} peers, itself included"
    return f"the mean of {count} sites' updates"


def _value(text: str) -> Any:
    """A setting whose repr() this is; the text itself where there is no such literal, as of infinity."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _table(left: str, right: str, rows: dict[str, str]) -> str:
    if not rows:
        return "None."
    return "\n".join([f"| {left} | {right} |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])
