"""Every fenced block can be run or says why not, and the runner finds what is wrong. `make test-docs` runs all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of, commands, pages, problem
from tests.docs.notebooks import notebooks, run_here
from tests.docs.notebooks import problem as notebook_problem
from tests.docs.run import run_page
from tests.docs.session import matches


def test_every_block_is_run_or_has_a_reason_that_is_one():
    wrong = [f"{block.place}: {error}" for page in pages() for block in blocks_of(page) if (error := problem(block))]
    assert not wrong, "see the head of tests/docs/blocks.py:\n" + "\n".join(wrong)


def test_no_comment_stands_apart_from_its_block():
    apart = []
    for page in pages():
        text = (ROOT / page).read_text()
        inside = sum(len(block.notes) for block in blocks_of(page))
        written = sum(text.count(f"<!-- {kind}: ") for kind in ("shown", "file", "check", "with", "before"))
        if written != inside:
            apart.append(page)
    assert not apart, f"a comment stands on the line before a fence: {apart}"


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```python\nx = 1\n```\n", "assert"),
        ("```\n-->\n```\n", "comment with the reason"),
        ("<!-- shown: no time -->\n```text\nx\n```\n", "not a reason"),
        ("<!-- shown: a response; run by make test-nothing -->\n```json\n{}\n```\n", "neither a file nor a target"),
        ("```json\n{}\n```\n", "file, check or shown"),
        ("<!-- shown: a response -->\n```json\n{\n```\n", "Expecting"),
        ("```console\n$ quire serve leaf --max-seqs 3\n```\n", "--max-seqs"),
        ("<!-- shown: needs root -->\n```sh\nquire serv leaf\n```\n", "no command 'serv'"),
    ],
)
def test_a_block_that_cannot_be_judged_is_refused(block: str, error: str):
    (found,) = blocks_of("page.md", f"# Page\n\n{block}")
    assert error in problem(found)


def test_output_is_compared_as_it_is_shown():
    shown = "$ one \\\n  two 'a\nb'  # why\n1\n...\n9\n$ three\n"
    assert commands(shown) == [("one \\\n  two 'a\nb'  # why\n", "1\n...\n9\n"), ("three\n", "")]
    assert matches("1\n...\n9\n", "1\n5\n9 \n") and not matches("1\n...\n9", "1\n5\n8") and not matches("1", "1\n2")


PAGE = """
<!-- file: names.json -->
```json
{"name": "quire"}
```

<!-- before: export GREETING=hello -->
<!-- with: NAME=names -->
```console
$ cat NAME.json; echo "$GREETING" >greeting
{"name": ...}
$ cat greeting
hello
```

```python
import json
from pathlib import Path
name = json.loads(Path("names.json").read_text())["name"]
assert name == "quire"
```

```python
print(name, 1)
```

```text
quire 2
```

```console
$ false
```
"""


def test_a_page_is_run_from_top_to_bottom_and_what_it_gets_wrong_is_found():
    counts: Counter[str] = Counter()
    wrong_print, wrong_status = run_page("page.md", counts, PAGE)
    assert "page.md:23" in wrong_print and "quire 2" in wrong_print and "quire 1" in wrong_print
    assert "page.md:31" in wrong_status and "status 1" in wrong_status
    assert (counts["blocks"], counts["run"]) == (5, 5)


SERVED = """
```console
$ quire serve leaf --num-gpu-blocks-override 64
$ curl -s http://127.0.0.1:8000/v1/models
{"object":"list","data":[{"id":"leaf",...
```
"""


def test_a_server_of_a_page_gets_a_free_port_and_ends_with_it():
    counts: Counter[str] = Counter()
    assert run_page("page.md", counts, SERVED) == []


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_does_what_it_says(path: Path, capsys):
    assert not notebook_problem(path)
    run_here(path)
    assert capsys.readouterr().out


def test_a_page_of_a_served_model_is_run_as_it_stands():
    counts: Counter[str] = Counter()
    assert run_page("docs/how-to/batch-files.md", counts) == []
    assert counts["run"] == 2
