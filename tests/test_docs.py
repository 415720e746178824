"""The pages held to what is there: links, commands, code, tests that they cite."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from fedtrain.cli import cli

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def pages():
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.split() or [
        str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    ]
    return [name for name in names if "templates" not in name and (ROOT / name).exists()]


def prose(text):
    """Without fenced blocks and code spans, where [x](y) is no link."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(path):
    """The #fragments of a page, as code hosts make them of its headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def commands():
    """Every command as its words: "simulate", "certs init"."""
    found = {}
    for name, command in ((name, cli.get_command(None, name)) for name in cli.list_commands(None)):
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": each for inner, each in command.commands.items()}
    return found


def invocations(text):
    """Each `fedtrain ...` in code, as the words after it."""
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for line in lines:
        for match in re.finditer(r"(?:^|&& |; |=\S+ )fedtrain ((?:[a-z]+ ?)[^;&|`]*)", line):
            yield match[1].split()


@pytest.mark.parametrize("page", pages())
def test_every_relative_link_leads_somewhere(page):
    path = ROOT / page
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        file, _, fragment = target.partition("#")
        if "://" in target:
            continue
        to = (path.parent / file).resolve() if file else path
        if not to.exists() or (fragment and fragment not in anchors(to)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", pages())
def test_every_command_on_a_page_is_one_with_the_options_it_shows(page):
    known, bad = commands(), []
    for words in invocations((ROOT / page).read_text()):
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        if name not in known:
            bad.append(" ".join(words))
            continue
        options = {opt for p in known[name].params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
        bad += [
            f"{name} {w}" for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in options
        ]
    assert bad == []


def test_the_search_for_commands_finds_them():
    text = "`fedtrain simulate --fresh`\n```\nA=b fedtrain nonsense | jq\n"
    text += "fedtrain new x && fedtrain certs init\n```\n"
    assert sorted(" ".join(words) for words in invocations(text)) == [
        "certs init", "new x", "nonsense", "simulate --fresh",
    ]  # fmt: skip


@pytest.mark.parametrize("page", pages())
def test_every_python_block_compiles(page):
    for language, block in FENCE.findall((ROOT / page).read_text()):
        if language == "python":
            ast.parse(block)


@pytest.mark.parametrize("page", pages())
def test_every_toml_block_is_a_configuration(page):
    from fedtrain.config import Config

    for language, block in FENCE.findall((ROOT / page).read_text()):
        if language == "toml":
            Config.of(tomllib.loads(block))


def test_the_readme_shows_a_whole_task_in_fifteen_lines_that_trains(tmp_path):
    import torch

    from fedtrain.arena import Arena
    from fedtrain.config import Config
    from fedtrain.runtime.trainers.workbench import Workbench

    (block,) = [b for language, b in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    assert len(block.splitlines()) <= 15
    (tmp_path / "readme_task.py").write_text(block)
    (tmp_path / "data").mkdir()
    rows = "".join(",".join(map(str, [*range(i, i + 15), i % 2])) + "\n" for i in range(8))
    (tmp_path / "data" / "north.csv").write_text(rows)
    bench = Workbench(Config.of({"run": {"task": "readme_task:Heart"}}, tmp_path), simulated=False)
    weights = bench._engine.initial()
    update = bench.train("north", 0, weights, Arena.zeros(weights.schema))
    assert update.num_examples == 8
    assert torch.isfinite(update.delta.views()["weight"]).all()


@pytest.mark.slow(8)
def test_what_the_readme_types_in_python_gives_what_it_shows(tmp_path, monkeypatch):
    import doctest
    import shutil

    (block,) = [b for language, b in FENCE.findall((ROOT / "README.md").read_text()) if language == "pycon"]
    shutil.copytree(
        ROOT / "examples" / "heart", tmp_path / "examples" / "heart", ignore=shutil.ignore_patterns("runs")
    )
    monkeypatch.chdir(tmp_path)
    typed = doctest.DocTestParser().get_doctest(block, {}, "README", None, None)
    assert doctest.DocTestRunner().run(typed) == (0, 4)


def test_from_nothing_to_three_sites_takes_seven_commands():
    blocks = [block for _, block in FENCE.findall((ROOT / "README.md").read_text())]
    (steps,) = [block.splitlines() for block in blocks if "fedtrain new clinic" in block]
    assert len(steps) <= 7
    words = [re.split(r" {2,}", step)[0] for step in steps]
    assert words[-3:] == [f"fedtrain site site-{i}" for i in (1, 2, 3)]


def test_every_test_that_the_security_page_cites_is_there():
    cited = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(cited) > 30
    missing = [
        f"{file}::{name}"
        for file, name in cited
        if not re.search(rf"^(?:async )?def {name}\(", _source(ROOT / "tests" / file), re.M)
    ]
    assert missing == []


def test_each_number_of_the_security_page_has_a_test_of_that_number():
    """S1 to S40: a row of the page, which names a test whose own name begins with the number."""
    page = (ROOT / "docs" / "security.md").read_text()
    rows = {int(number): "" for number in re.findall(r"^\| S(\d+) \|", page, re.M)}
    for number in rows:
        rows[number] = "".join(re.findall(rf"^\| S{number} \|.*", page, re.M))
    assert sorted(rows) == [*range(1, 41)]
    assert [n for n, row in rows.items() if not re.search(rf"::test_(s\d+_)*s0?{n}_", row)] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/simulation.md"])
def test_files_and_tests_that_other_pages_name_are_there(page):
    text = (ROOT / page).read_text()
    sources = "\n".join(_source(path) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in sources, name
    for file in re.findall(r"`((?:\w+/)+\w+\.py|test_\w+\.py)`", text):
        assert any((ROOT / top / file).exists() for top in ("", "fedtrain", "tests")), file


def test_the_house_drawn_in_the_architecture_is_the_house():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (drawn,) = [block for _, block in FENCE.findall(text) if block.startswith("fedtrain/\n")]
    package = ROOT / "fedtrain"
    inner = {"parallel", "rules"}  # drawn as words of their folders' lines
    folders = {p.parent.name for p in package.rglob("__init__.py")} - {"fedtrain", *inner} | {"templates"}
    assert set(re.findall(r"(?:^|  )(\w+)/(?= )", drawn)) - inner == folders
    files = set(re.findall(r"(\w+\.py)\b", drawn))
    there = {p.name for p in package.rglob("*.py") if "templates" not in p.parts}
    assert files - there == set()
    spread = [
        p
        for folder in ("runtime", "store", "transport", "wire", "training")
        for p in (package / folder).rglob("*.py")
        if p.parent.name != "parallel"
    ]
    assert {p.name for p in spread} - {"__init__.py"} - files == set()


def test_the_index_has_one_line_for_each_page():
    index = (ROOT / "docs" / "README.md").read_text()
    lines = re.findall(r"^\| \[[^]]+\]\((\w[\w-]*\.md)\) \|", index, re.M)
    assert sorted(lines) == sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md")


def test_the_glossary_is_short_and_has_each_word_once():
    words = re.findall(r"^\| (\*\*.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 30 <= len(set(words)) == len(words) <= 40


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_no_line_of_prose_is_longer_than_160_characters(page):
    lines = FENCE.sub("", (ROOT / page).read_text()).splitlines()
    assert [line for line in lines if len(line) > 160 and not line.startswith(("|", "!["))] == []


def test_s37_the_dependencies_are_those_that_the_security_page_lists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", each)[0] for each in project["dependencies"]]
    (listed,) = re.findall(
        r"^\| S37 \|.*?server: ([\w, ]+) \|", (ROOT / "docs" / "security.md").read_text(), re.M
    )
    assert sorted(listed.split(", ")) == sorted(names)


def _source(path):
    return path.read_text() if path.exists() else ""
