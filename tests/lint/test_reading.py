"""What is read: scripts, notebooks with magics, Markdown; one broken piece hides nothing else."""

from __future__ import annotations

import json
import sys

import pytest

from buoy.lint import engine, rules
from buoy.lint.model import Diagnostic
from buoy.lint.target import Target

ALL = set(rules.all_codes())
TARGET = Target("colab-t4", (12 << 30, None, "the test"))


def check(source: str | bytes, name: str = "train.py") -> list[Diagnostic]:
    data = source if isinstance(source, bytes) else source.encode()
    return engine.check_source(name, data, TARGET, ALL)


def notebook(*cells: str | list[str], **metadata: object) -> bytes:
    content = [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells]
    return json.dumps({"cells": content, "nbformat": 4, "nbformat_minor": 5, "metadata": metadata}).encode()


def undefined(source: bytes, name: str = "a.ipynb") -> set[str]:
    return {item.message.split("`")[1] for item in check(source, name) if item.code in ("BY101", "BY102")}


def broken(source: bytes | str, name: str = "a.ipynb") -> list[Diagnostic]:
    return [item for item in check(source, name) if item.code == "BY981"]


@pytest.mark.parametrize(
    "cell",
    [
        "%%time\nx = 1\nprint(x)",
        "%%capture out\nx = 1\nprint(x, out)",
        "!pip install keras\n%matplotlib inline\nx = 1\nprint(x)",
        "files = !ls *.png\nprint(files)",
        "%time x = 1\nprint(x)",
        "%timeit -n 10 sum(range(3))",
        "%timeit -r1 for x in range(3): pass",
        "len?\n?len\nprint??",
        "cd ..",
        "cd ../data\nx = 1\nprint(x)",
        "%cd /content\nls\n!wget a \\\n  b\nprint(1)",
        "  x = 1\n  print(x)",
        "\n\n    x = 1\n    print(x)",
        " # a comment further in\nx = 1\nif x:\n  print(x)",
        " ",
        "for i in range(2):\n    !echo {i}",
        "print('%d' % 3\n      % ())",
        "%%bash\nls $HOME && foo",
        "%%writefile a.py\nprint(unknown_here)",
        "get_ipython().system('ls')\ndisplay(_)",
        "if True:\n    %load_ext autoreload",
        "# comment first\n%%time\nx = 1\nprint(x)",
        "%%time\n%%capture out\nx = 1\nprint(x, out)",
        "%%capture\n\n# and then\n%%time\nx = 1\nprint(x)",
        "%%time\n%%bash\nls -l | wc",
    ],
)
def test_magics_are_understood(cell: str) -> None:
    """Neither a syntax error nor an undefined name comes from IPython's own syntax."""
    assert [item.message for item in check(notebook(cell), "a.ipynb")] == []


def test_code_inside_a_magic_is_checked() -> None:
    assert undefined(notebook("%%time\nx = missing")) == {"missing"}
    assert undefined(notebook("%time fit(missing)", "fit = print")) == {"missing"}


def test_a_name_in_exported_magic_is_checked_and_one_defined_there_is_known() -> None:
    source = b"import os\nget_ipython().run_cell_magic('time', '', 'total = 1\\nprint(missing)\\n')\nprint(total)\n"

    assert undefined(source, "export.py") == {"missing"}


def test_names_that_may_come_from_elsewhere_are_not_reported() -> None:
    assert undefined(notebook("%run setup.py\nprint(from_setup)")) == set()
    assert undefined(notebook("from utils import *\nprint(from_utils)")) == set()
    assert undefined(notebook("%%some_extension\nx y z", "print(x)")) == set()


def test_old_notebooks_keep_their_cells_in_worksheets() -> None:
    cells = [{"cell_type": "code", "input": ["x = 1\n", "print(missing)"], "language": "python"}]
    data = json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}], "metadata": {}}).encode()

    (found,) = check(data, "old.ipynb")
    assert (found.start.cell, found.start.line, found.start.column) == (1, 2, 7)


def test_a_notebook_of_another_language_is_left_alone() -> None:
    assert check(notebook("x <- c(1, 2)", kernelspec={"language": "R"}), "r.ipynb") == []


def test_a_broken_cell_hides_nothing_else() -> None:
    found = check(notebook("x = = 1", "print(missing)", "y = ("), "a.ipynb")

    assert sorted((item.code, item.start.cell) for item in found) == [
        ("BY102", 2),
        ("BY981", 1),
        ("BY981", 3),
    ]


def test_a_name_that_a_broken_cell_may_define_is_not_reported() -> None:
    assert undefined(notebook("model = build(\n", "print(model)")) == set()


def test_a_syntax_error_in_a_script_hides_nothing_else() -> None:
    found = check("import numpy as np\nx = = 1\nprint(np.float(3))\n")

    assert {item.code for item in found} == {"BY206", "BY981"}


def test_places_in_a_notebook_are_cell_and_line_inside_it() -> None:
    markdown = {"cell_type": "markdown", "source": "text"}
    code = {"cell_type": "code", "source": ["import os\n", "print(missing)"]}
    data = json.dumps({"cells": [markdown, code], "metadata": {}, "nbformat": 4}).encode()

    (found,) = check(data, "a.ipynb")
    assert str(found.start) == "cell 2:2:7"
    assert found.source == ("print(missing)",)


def test_columns_count_characters_not_bytes() -> None:
    (found,) = check("import os; text = 'äöü€'; print(missing, os)\n")

    assert found.start.column == 33


def test_markdown_fences_are_checked_and_a_placeholder_makes_missing_names_notes() -> None:
    page = "# Title\n\n```python\nprint(missing)\n```\n\n```bash\nls missing\n```\n"
    announced = page.replace("print(", "# ... the model as above\nprint(")

    (found,) = check(page, "page.md")
    assert (found.severity, found.start.line) == ("error", 4)
    assert [item.severity for item in check(announced, "page.md")] == ["note"]


def test_fences_in_lists_are_read_at_their_own_depth() -> None:
    page = "1. do this\n\n   ```python\n   import os\n   def f():\n       return os\n   f(missing)\n   ```\n"
    page += "2. then\n    - ```py\n      x = 1\n      print(other, x)\n      ```\n"

    assert [(item.message.split("`")[1], str(item.start)) for item in check(page, "page.md")] == [
        ("missing", "7:6"),
        ("other", "12:13"),
    ]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads it")
@pytest.mark.parametrize(
    "line",
    [
        'print(f"{d["key"]}")',
        'print(f"{", ".join(d)}")',
        "type Pair = tuple[int, int]",
        "def first[T](x: T) -> T: ...",
        "class Box[T]: ...",
        "try: pass\nexcept ValueError, TypeError: pass",
    ],
)
def test_syntax_of_a_later_python_is_a_note_that_names_both(line: str) -> None:
    (found,) = broken(f"d = {{}}\n{line}\n", "a.py")

    assert found.severity == "note"
    assert f"Python 3.{sys.version_info[1]}, which runs buoy" in found.message and "Python 3.1" in found.hint


def test_a_syntax_error_shows_a_line_with_text_and_the_python_that_read_it() -> None:
    (found,) = broken("for x in range(3):\n\n\n", "a.py")

    assert (found.source, found.severity) == (("for x in range(3):",), "error")
    assert f"in Python {sys.version_info[0]}.{sys.version_info[1]}" in found.message


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("import os\nx = 1\ndel x\nprint(x, os)\n", [4]),
        ("import os\nx = 1\ndel x\nx = 2\nprint(x, os)\n", []),
        ("import os\nx = 1\nprint(x, os)\ndel x\n", []),
        ("import os\nx = 1\nif os:\n    del x\nprint(x)\n", []),
        ("import os\nx = 1\ndel x\ny = [x for _ in os.environ]\n", [4]),
        ("import os\ndef f(x):\n    del x\n    return x, os\nf(1)\n", [4]),
        ("import os\nlist = 1\ndel list\nprint(list, os)\n", []),
        ("import os\nx = 1\ndef f():\n    return x, os\nf()\ndel x\n", []),
        ("import os\nx = 1\ndel x\nfor x in os.environ:\n    print(x)\n", []),
    ],
)
def test_a_deleted_name_is_gone_until_it_is_set_again(source: str, places: list[int]) -> None:
    found = [item for item in check(source) if "`del` in line 3" in item.message]

    assert [item.start.line for item in check(source)] == places and len(found) == len(places)


def test_names_are_resolved_as_python_does() -> None:
    """Scopes, comprehensions, classes, globals, walrus, match, except, lambda, star arguments."""
    source = """
import os.path as p
from a import b as c
def f(x, *args, y=1, **kwargs):
    global made
    made = [i for i in x if (last := i)]
    def inner():
        nonlocal x
        x = 2
        return made, last, args, kwargs, y, later
    return inner
later = 1
class A:
    size = 3
    other = size
    def method(self):
        return __class__, self
try:
    pass
except ValueError as error:
    print(error)
match later:
    case {"k": v, **rest}:
        print(v, rest)
    case [first, *others]:
        print(first, others)
print(made, p, c, (lambda q: q)(1), {k: w for k, w in {}.items()}, __name__, __file__)
with open("x") as handle:
    print(handle)
"""
    assert [item.message for item in check(source)] == []


def test_a_script_that_imports_nothing_is_a_fragment_whose_names_come_from_elsewhere() -> None:
    """Solutions that a notebook takes in with `%load`: one note, whether by name or on standard input."""
    for name in ("solution.py", "-"):
        (found,) = check("loss = K.mean(y - target)\nprint(K)\n", name)
        assert (found.severity, found.start.line) == ("note", 1)
        assert "uses 3 names that it does not define (`K`, `y`, `target`)" in found.message
    assert undefined(b"import numpy\nloss = K.mean(y - target)\n", "solution.py") == {"K", "y", "target"}


def test_a_script_with_magics_is_checked_like_a_cell_and_said_to_be_one() -> None:
    found = check("import numpy as np\n%timeit np.ones(3)\nx = np.float(3)\n")

    assert [(item.code, item.severity) for item in found] == [("BY981", "warning"), ("BY206", "error")]


def test_a_class_attribute_is_not_a_name_inside_its_methods() -> None:
    assert undefined(b"class A:\n    size = 3\n    def f(self):\n        return size\n", "a.py") == {"size"}


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    unicode\nexcept NameError:\n    unicode = str\n",
        "if 'x' in globals():\n    print(x)\n",
        "exec('x = 1')\nprint(x)\n",
        "if False:\n    print(x)\n",
        "import sys\nx = 'a'\nif sys.version_info[0] == 2 and isinstance(x, unicode):\n    print(x)\n",
    ],
)
def test_code_that_expects_the_name_to_be_missing_is_left_alone(source: str) -> None:
    assert undefined(source.encode(), "a.py") == set()


FIT = "import keras\nmodel = keras.Sequential()\nmodel.compile(loss='mse')\n"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (FIT + "model.fit([1], [1], epochs=20)\nprint(missing)\n", "BY101"),
        (FIT + "print(missing)\nmodel.fit([1], [1], epochs=20)\n", "BY102"),
        (FIT + "def train():\n    model.fit([1], [1], epochs=20)\ntrain()\nprint(missing)\n", "BY101"),
        (FIT + "def show():\n    print(missing)\nmodel.fit([1], [1], epochs=20)\nshow()\n", "BY101"),
        (FIT + "if keras:\n    model.fit([1], [1], epochs=20)\nelse:\n    print(missing)\n", "BY102"),
        ("import torch\nfor i in range(20):\n    torch.ones(1).backward()\nprint(missing)\n", "BY101"),
    ],
)
def test_what_fails_after_training_is_told_apart(source: str, code: str) -> None:
    (found,) = check(source)

    assert found.code == code
    assert ("after 20 epochs of training" in found.message) == (code == "BY101")


def test_a_pinned_older_release_silences_what_is_still_there() -> None:
    removed = "from keras.utils import np_utils\nprint(np_utils)"

    assert [item.code for item in check(notebook(removed), "a.ipynb")] == ["BY201"]
    assert check(notebook("!pip install -q keras==2.3.1", removed), "a.ipynb") == []


def test_a_method_of_a_class_from_elsewhere_is_not_keras() -> None:
    source = "import keras\nfrom {} import Chatbot\nbot = Chatbot()\nbot.fit_generator(1)\n"

    assert check(source.format("chatbot")) == []
    assert [item.code for item in check(source.format("keras.models"))] == ["BY201"]


def test_code_of_another_age_is_one_finding() -> None:
    source = (
        "import tensorflow as tf\nx = tf.placeholder(tf.float32)\ny = tf.log(x)\nprint(tf.Session().run(y))\n"
    )

    (found,) = check(source)
    assert "TensorFlow 1 code: 3 names" in found.message and found.start.line == 2


def test_what_a_version_test_guards_is_left_alone() -> None:
    assert check("import numpy as np\nif np.__version__ < '1.20':\n    x = np.float(1)\n") == []
    assert (
        check("try:\n    from keras.utils import np_utils\nexcept ImportError:\n    np_utils = None\n") == []
    )


HALF = (
    "import keras\n{before}def build():\n"
    "    return keras.Sequential([keras.layers.Dense(9, activation='softmax')])\n{after}"
)
SET = "keras.mixed_precision.set_global_policy('mixed_float16')\n"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (SET, "model = build()\n", True),
        ("", SET + "model = build()\n", True),
        ("", "model = build()\n" + SET, False),
        ("", "def other():\n    " + SET + "model = build()\n", False),
        ("", "def main():\n    " + SET + "    model = build()\nmain()\n", True),
    ],
)
def test_half_precision_counts_only_where_it_is_set_before(before: str, after: str, found: bool) -> None:
    codes = [item.code for item in check(HALF.format(before=before, after=after))]

    assert ("BY961" in codes) == found


def test_a_step_that_calls_itself_again_inside_except_is_a_retry() -> None:
    source = """
import torch
class Trainer:
    def step(self, batch, again=False):
        try:
            return self.model(batch)
        except RuntimeError as error:
            if 'out of memory' in str(error) and not again:
                return self.step(batch, again=True)
            raise
"""

    assert [(item.code, item.start.line) for item in check(source)] == [("BY407", 9)]


ACCUMULATED = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.{}(model.parameters(), lr=0.1)
loader = [torch.ones(1)] * 8
for i, batch in enumerate(loader):
    model(batch).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("optimizer", "found"), [("SGD", ["BY502"]), ("AdamW", []), ("Adam", [])])
def test_summed_gradients_count_only_where_their_length_does(optimizer: str, found: list[str]) -> None:
    """Adam divides by the size of the gradient: a constant factor is all but lost."""
    assert [item.code for item in check(ACCUMULATED.format(optimizer))] == found


def test_hints_and_carets_point_at_what_is_to_be_written() -> None:
    (image,) = check("from PIL import Image\nImage.open('a').resize((2, 2), Image.ANTIALIAS)\n")
    (period,) = check("import keras\nkeras.callbacks.ModelCheckpoint('a.keras', period=5)\n")

    assert image.hint == "write `Image.LANCZOS`"
    assert period.source[0][period.start.column - 1 : period.end.column - 1] == "period=5"
