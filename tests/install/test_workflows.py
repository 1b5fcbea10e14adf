"""The workflows and forms in .github, and the pages of the project next to README.

run: make TARGET NAME=value --> the Makefile has the target and reads the variables
                            --> .ci/run or tests/checks/check_all.py runs the target too
"""

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ..checks.check_all import PARTS

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(path.name for path in (GITHUB / "workflows").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PREFIX = "Programming Language :: Python :: "
PYTHONS = [line.removeprefix(PREFIX) for line in PROJECT["classifiers"] if line.startswith(PREFIX)]
PAGES = ("SECURITY.md", "CODE_OF_CONDUCT.md", "ROADMAP.md", "RELEASING.md")
ELSEWHERE = {
    "check-all": "it is the list of the parts",
    "upstream-torch": "installs a build that is another one every day",
    "upstream-jax": "the same",
}


class Make(NamedTuple):
    target: str
    variables: dict[str, str]


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((GITHUB / "workflows" / name).read_text())


def make(command: str) -> Make:
    """`make TARGET NAME=value ...`, and nothing else: no second command, option or redirection."""
    matched = re.fullmatch(r"make ([a-z-]+)((?: [A-Z]+=[\w.-]+)*)", command)
    assert matched, command
    return Make(matched[1], dict(each.split("=") for each in matched[2].split()))


def steps(name: str) -> list[dict[str, Any]]:
    """The steps of all jobs, once per value of the matrix."""
    found = []
    for job in workflow(name)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            for step in job["steps"]:
                text = json.dumps(step)
                for key, value in zip(matrix, values, strict=True):
                    text = text.replace(f"${{{{ matrix.{key} }}}}", value)
                found.append(json.loads(text))
    return found


def runs(name: str) -> list[Make]:
    return [make(step["run"]) for step in steps(name) if "run" in step]


def ci_targets() -> set[str]:
    return {make(line).target for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")}


@pytest.fixture(scope="module")
def targets() -> set[str]:
    """The targets of the Makefile that are no files, all of which have a rule."""
    text = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(listed.split()) == set(re.findall(r"^([a-z-]+):(?: \.venv/[\w.]+)*$", text, re.MULTILINE))
    return set(listed.split())


def test_a_step_is_one_command() -> None:
    assert make("make wheel CUDA=ON PYTHON=python3.11") == ("wheel", {"CUDA": "ON", "PYTHON": "python3.11"})
    for command in ("pytest", "make test; x", "make test && x", "make -k test", "make test\nmake lint"):
        with pytest.raises(AssertionError):
            make(command)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_steps_are_targets_that_run_elsewhere_too(name: str, targets: set[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    local = ci_targets() | {make(" ".join(part.command[:2])).target for part in PARTS}
    assert runs(name)
    for run in runs(name):
        assert run.target in targets, run
        assert run.target in local | set(ELSEWHERE), run
        for variable in run.variables:
            assert re.search(rf"^(?:{run.target}: )?{variable} \?=", makefile, re.MULTILINE), run


def test_the_workflows_run_what_ci_runs() -> None:
    every = {run.target for name in WORKFLOWS for run in runs(name)}
    assert ci_targets() == {"lint", "wheel", "test"}
    assert ci_targets() | set(ELSEWHERE) <= every  # check-all among them, and so every part


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_the_least_rights(name: str) -> None:
    """Read access to the sources, no secret, actions and images of a full version, an end."""
    text, content = (GITHUB / "workflows" / name).read_text(), workflow(name)
    assert content["permissions"] == {"contents": "read"}
    assert not re.search(r"secrets|github\.token|GITHUB_TOKEN|pull_request_target", text)
    assert set(re.findall(r"\$\{\{ *([\w.]+)", text)) <= {"matrix.python", "matrix.framework"}  # no text of a stranger
    for job in content["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 180
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        assert re.fullmatch(r"quay\.io/pypa/manylinux_2_28_x86_64:[\d.]+-\d+", job.get("container", "")) or (
            "container" not in job
        )
    for step in steps(name):
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", step.get("uses", "actions/none@v0.0.0")), step
        if "checkout" in step.get("uses", ""):
            assert step["with"] == {"persist-credentials": False}


def test_one_version_of_an_action() -> None:
    used = {step["uses"] for name in WORKFLOWS for step in steps(name) if "uses" in step}
    assert len({action.split("@")[0] for action in used}) == len(used)


def test_the_pythons_are_those_of_the_classifiers() -> None:
    assert PYTHONS == ["3.11", "3.12", "3.13"]
    assert workflow("test.yml")["jobs"]["cpu"]["strategy"]["matrix"]["python"] == PYTHONS
    # The wheel of 3.12 is the one for later releases.
    abi = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["py-api"]
    built = workflow("wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    assert built == [python for python in PYTHONS if int(python.removeprefix("3.")) <= int(abi.removeprefix("cp3"))]
    for name in WORKFLOWS:
        used = {step["with"]["python-version"] for step in steps(name) if "setup-python" in step.get("uses", "")}
        assert used <= set(PYTHONS), name


def test_uploads_are_written_by_the_step_before() -> None:
    """Folders of the Makefile; an upload of nothing fails."""
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "mkdocs.yml").read_text()
    for step in (step for name in WORKFLOWS for step in steps(name) if "upload-artifact" in step.get("uses", "")):
        assert step["with"]["path"] in makefile
        assert step["with"]["if-no-files-found"] == "error"


def test_a_bug_asks_for_the_report_of_the_doctor() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    assert {field["type"] for field in form["body"]} <= {"textarea", "input"}
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    first = form["body"][0]
    assert "`python -m mxep.doctor`" in first["attributes"]["label"]
    assert first["validations"]["required"] is True


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_names_nothing_that_does_not_exist(name: str, targets: set[str]) -> None:
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"https?:|www\.|\w@\w|(?:^|\s)@\w", text)  # an address or a person
    for path in re.findall(r"\]\(([^)#]+)", text) + re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:md|toml|cff))`", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"`((?:[\w-]+/)+[\w-]+)`", text):
        assert (ROOT / path).exists(), path
    workflows = re.findall(r"[Tt]he workflow `([\w-]+)`", text)
    assert {f"{each}.yml" for each in workflows} <= set(WORKFLOWS)
    for command in re.findall(r"`make ([a-z -]+)`", text):
        assert set(command.split()) <= targets, command
