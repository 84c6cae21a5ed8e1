"""The wheel holds the two packages and nothing else, and works where only it is installed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import compress, hooks, importlib.metadata
assert compress.__file__.startswith({target!r}), compress.__file__
assert importlib.metadata.version("gradwire") == compress.__version__
print(compress.simulate("sign", [[[1.0, -1.0], [3.0, -3.0]]]).means[0].tolist(), hooks.powersgd_hook.__name__)
"""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        cwd=environment.get("HOME"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_and_works(tmp_path: Path) -> None:
    built, target = tmp_path / "built", tmp_path / "installed"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(ROOT))
    (wheel,) = built.glob("*.whl")
    packages = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert packages == {"compress", "hooks"}
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    printed = run(sys.executable, "-c", SCRIPT.format(target=str(target)), PYTHONPATH=str(target), HOME=str(tmp_path))
    assert printed == "[2.0, -2.0] powersgd_hook\n"
