"""Loaded by every Python below `buoy run`, before the script: joins the attempt, then makes way.

Python imports a module of this name at start-up. `buoy run` puts this folder first on PYTHONPATH; here it is taken
off again, a `sitecustomize` of the user's own is run, and nothing that fails here reaches the script.

A Python that the command or a shell starts is recorded from its start. The ones that it starts in turn (there may be
thousands) only once they import a framework: until then they pay for this file and nothing else.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_FRAMEWORKS = ("torch", "keras")


def _run_user_sitecustomize() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _load_buoy() -> None:
    """The script may run in another environment than buoy: load our package from where it is, off sys.path."""
    if "buoy" in sys.modules:
        return
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.dirname(os.path.dirname(_HERE))
    spec = spec_from_file_location(
        "buoy", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["buoy"] = module
    spec.loader.exec_module(module)


def _join() -> None:
    try:
        _load_buoy()
        from buoy.flight import recorder

        attempt = recorder.attempt_of_environment()
        if attempt is not None and not recorder.is_helper_process():
            joined = recorder.join(attempt)
            from buoy.supervisor.upkeep import Following

            Following(joined)
    except Exception as error:  # noqa: BLE001 - an old Python, a full disk: the script runs unrecorded from inside
        _log_failure(error)


def _log_failure(error: Exception) -> None:
    try:
        path = os.path.join(os.environ["BUOY_ATTEMPT"], "sidecar.log")
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        words = f"process {os.getpid()} ({sys.version.split()[0]}) was not joined: {error!r}\n"
        os.write(log, words.encode(errors="replace"))
        os.close(log)
    except (OSError, KeyError):
        pass


class _JoinOnFrameworkImport:
    """Joins as soon as a framework is asked for, just before it is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in _FRAMEWORKS:
            sys.meta_path.remove(self)
            _join()
            for finder in sys.meta_path:  # ours is there now, to be called after the import
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


if os.environ.get("BUOY_JOINED", str(os.getpid())) != str(os.getpid()):  # one of our parents is recorded
    sys.meta_path.insert(0, _JoinOnFrameworkImport())
else:
    _join()
_run_user_sitecustomize()
