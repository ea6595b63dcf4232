"""The documentation site: its links, its generated pages, and the tables for those who come from other projects."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from roll_async.config.loading.names import REFUSED, alias_table
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.yaml.paths import keys
from tests.patience import patient
from tools import site

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [*(ROOT / "docs_roll").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
     ROOT / "examples" / "my_project" / "README.md"]
)  # fmt: skip
GENERATED = {"models.md", "my_project.md", "contributing.md", "from_roll_keys.md", "from_verl_keys.md"}
"""Pages of the site alone, which documents of docs_roll may link to."""


def links(text):
    without_code = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", without_code) if "://" not in target]


def headings(path):
    """Anchors as GitHub and the site make them."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_heading(document):
    wrong = []
    for link in links(document.read_text()):
        path, _, part = unquote(link).partition("#")
        target = document.parent / path if path else document
        if target.name in GENERATED and target.parent.resolve() == ROOT / "docs_roll":
            continue
        if not target.exists() or (part and part not in headings(target)):
            wrong.append(link)
    assert wrong == []


def test_links_of_documents_outside_of_the_pages_are_those_of_the_site():
    text = "[a](docs_roll/runs.md#x) [b](CONTRIBUTING.md) [c](LICENSE) [d](https://x.org) ![e](docs_roll/figures/f.png)"
    assert (
        site.linked(text, "README.md") == "[a](runs.md#x) [b](contributing.md) c [d](https://x.org) ![e](figures/f.png)"
    )
    up = "[p](../../examples/my_project/README.md) [q](kl.md)"
    assert site.linked(up, "docs_roll/algorithms/kl.md") == "[p](../my_project.md) [q](kl.md)"


def test_the_pages_of_keys_have_every_name_that_the_loader_answers():
    pages = {peer: site.keys_of(peer) for peer in ("ROLL", "verl")}
    for kind in ("rlvr", "agentic"):
        for old, new in alias_table(kind).items():
            (row,) = re.findall(rf"^\| `{re.escape(old)}` \| (.*) \|$", "\n".join(pages.values()), re.M)
            assert all(f"`{name}`" in row for name in new)
    assert "`data.train_batch_size`" in pages["verl"] and "`data.train_batch_size`" not in pages["ROLL"]
    assert all(f"`{key}`" in pages["ROLL"] for key in REFUSED)
    assert "| `MathRuleRewardWorker` | `math_rule` |" in pages["ROLL"]


@pytest.mark.parametrize("document", ["from_trl.md", "from_prime_rl.md"])
def test_what_a_table_for_newcomers_names_here_is_a_key(document):
    known = {*keys(RLVRConfig), *keys(AgenticConfig)}
    rows = re.findall(r"^\| [^|]* \| ([^|]*) \|", (ROOT / "docs_roll" / document).read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)", row)}
    named = {
        re.sub(r"\.(NAME|TAG)\b.*", "", name) for name in named
    }  # below a free name the keys are those of its type
    assert len(named) > 10 and {name for name in named - known if not name.startswith("my_")} == set()


@pytest.mark.slow
def test_the_page_of_models_has_every_shipped_config_with_devices():
    pytest.importorskip("ray")
    from tools.shipped_configs import shipped

    page = site.models()
    assert [path.stem for path in shipped() if f"`{path.stem}`" not in page or f"\n| {path.stem} | " not in page] == []


def test_the_page_of_own_code_shows_every_file_of_the_project():
    page = site.project()
    assert "def soft_clip(inputs" in page and "## answers.yaml" in page and "(rewards.md#your-own)" in page


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the docs extra is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "models.html").is_file() and (tmp_path / "zh" / "getting_started.html").is_file()
