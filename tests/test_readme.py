"""The README's example runs as it stands there and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_prints_what_the_readme_says():
    code, *sketches = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for sketch in sketches:  # with the reader's own model in it
        compile(sketch, str(README), "exec")
    assert len(code.splitlines()) <= 15
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert shown.getvalue().strip() == code.splitlines()[-1].removeprefix("# ")
