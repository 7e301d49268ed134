"""Loaded by every Python below `buoy run`, before the script: joins the attempt, then makes way.

Python imports a module of this name at start-up. `buoy run` puts this folder first on PYTHONPATH; here it is taken
off again, a `sitecustomize` of the user's own is run, and nothing that fails here reaches the script.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _make_way() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _join() -> None:
    # The script may run in another environment than buoy: load our package from where it is, and leave sys.path alone.
    if "buoy" not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        package = os.path.dirname(os.path.dirname(_HERE))
        spec = spec_from_file_location(
            "buoy", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules["buoy"] = module
        spec.loader.exec_module(module)
    from buoy.flight import recorder

    attempt = recorder.attempt_of_environment()
    if attempt is not None and not recorder.is_helper_process():
        recorder.join(attempt)


try:
    _join()
except Exception as _error:  # noqa: BLE001 - an old Python, a full disk: the script runs unrecorded from inside
    try:
        with open(os.path.join(os.environ["BUOY_ATTEMPT"], "sidecar.log"), "a") as _file:
            _file.write(f"process {os.getpid()} ({sys.version.split()[0]}) was not joined: {_error!r}\n")
    except (OSError, KeyError):
        pass
_make_way()
