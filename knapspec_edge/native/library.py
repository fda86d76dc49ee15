"""Finding, checking and loading the patched libraries.

The bindings of llama-cpp-python are used for llama.cpp's public interface; they load our libraries
because LLAMA_CPP_LIB_PATH names them. The functions that the patch adds are declared in
`bindings`. This module owns the rule that one process holds one llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ..errors import LibraryError
from . import giving_up, rpc

# Number of the C interface this package was written for; patches/UPSTREAM.toml holds the same.
ABI = 6

# A folder with other builds of the patched libraries (sanitizers, debugging).
OVERRIDE = "KNAPSPEC_EDGE_LIBRARY"

_BUILD_INFO = "_build_info.json"


def library_folder() -> Path:
    """Folder that holds libllama and the ggml libraries of this installation."""
    override = os.environ.get(OVERRIDE)
    if override:
        return Path(override)
    # an editable installation has its Python files in the checkout and the libraries elsewhere
    from . import __path__ as folders

    installed = [folder for f in folders if (folder := Path(f) / "lib").is_dir()]
    return installed[0] if installed else Path(__file__).parent / "lib"


def library_file(name: str) -> Path | None:
    """The shared library `name` ("llama", "ggml", ...) in our folder, or None."""
    patterns = {
        "win32": (f"{name}.dll", f"lib{name}.dll"),
        "darwin": (f"lib{name}.dylib", f"lib{name}.so"),
    }.get(sys.platform, (f"lib{name}.so",))
    return next((f for p in patterns if (f := library_folder() / p).is_file()), None)


def point_to_library() -> None:
    """Tell llama-cpp-python which libraries to load. Must run before it is imported."""
    os.environ["LLAMA_CPP_LIB_PATH"] = os.fspath(library_folder())


def _mapped_files() -> list[str]:
    """Paths of all shared libraries in this process; empty where the platform cannot tell."""
    if sys.platform.startswith("linux"):
        try:
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        except OSError:
            return []
        return sorted({x.split(maxsplit=5)[5] for x in lines if x.count(" ") >= 5 and "/" in x})
    if sys.platform == "darwin":
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        names = [dyld._dyld_get_image_name(i) for i in range(dyld._dyld_image_count())]
        return sorted({n.decode(errors="replace") for n in names if n})
    return []


def _foreign_libraries(folder: Path) -> list[str]:
    """Libraries of another llama.cpp or ggml that this process has already loaded."""
    ours = os.path.realpath(folder)
    foreign = []
    for path in _mapped_files():
        name = os.path.basename(path)
        if (
            name.startswith(("libllama.", "libggml"))
            and os.path.realpath(os.path.dirname(path)) != ours
        ):
            foreign.append(path)
    return foreign


def _refuse_foreign(folder: Path) -> None:
    foreign = _foreign_libraries(folder)
    if foreign:
        raise LibraryError(
            f"another llama.cpp is already loaded in this process ({foreign[0]}): two builds share "
            "their symbols and would mix; import knapspec_edge before llama_cpp, or use the other "
            "one in a process of its own"
        )


@lru_cache(maxsize=1)
def load() -> ModuleType:
    """The module llama_cpp.llama_cpp, bound to our libraries and initialised.

    Raises LibraryError if they are missing, of another ABI, or another copy is loaded.
    """
    folder = library_folder()
    if library_file("llama") is None:
        named = os.environ.get(OVERRIDE)
        do = f"correct {OVERRIDE}" if named else "install the package again (pip install .)"
        raise LibraryError(f"the patched llama.cpp is not in {folder}: {do}")
    _refuse_foreign(folder)
    point_to_library()
    try:
        import llama_cpp.llama_cpp as llama
    except (ImportError, OSError, RuntimeError) as error:
        raise LibraryError(
            f"llama-cpp-python could not load the libraries in {folder}: {error}"
        ) from error
    _refuse_foreign(folder)

    from . import bindings

    bindings.declare(llama._lib, folder)
    abi = llama._lib.knapspec_abi()
    if abi != ABI:
        raise LibraryError(
            f"the libraries in {folder} have interface {abi}, this program needs {ABI}: "
            "install the package again (pip install .)"
        )
    level = bindings.LOG_LEVELS.get(os.environ.get("KNAPSPEC_EDGE_NATIVE_LOG", ""), 0)
    llama._lib.knapspec_log_install(level)

    ggml = ggml_library()
    if ggml is not None:
        giving_up.install(ggml)
    if ggml is not None and _has_loadable_backends(folder):
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    llama.llama_backend_init()
    if ggml is not None:
        rpc.add_servers(ggml)
    return llama


def _has_loadable_backends(folder: Path) -> bool:
    """Whether backends are modules of their own (a build with GGML_BACKEND_DL)."""
    info = build_info()
    return bool(info.get("backend_modules")) or any(folder.glob("*ggml-cpu-*"))


# name -> (result, arguments); ggml-backend.h, in libggml-base but for the registry's functions
_GGML_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    # void ggml_backend_load_all_from_path(const char * dir_path);
    "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
    # size_t ggml_backend_dev_count(void);
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    # ggml_backend_dev_t ggml_backend_dev_get(size_t index);
    "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
    # const char * ggml_backend_dev_name(ggml_backend_dev_t device);
    "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    # const char * ggml_backend_dev_description(ggml_backend_dev_t device);
    "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
    # enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
    "ggml_backend_dev_type": (ctypes.c_int, [ctypes.c_void_p]),
    # void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
    "ggml_backend_dev_memory": (
        None,
        [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
    ),
    # ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
    "ggml_backend_dev_backend_reg": (ctypes.c_void_p, [ctypes.c_void_p]),
    # ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
    "ggml_backend_dev_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    # ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t device);
    "ggml_backend_dev_host_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    # const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
    "ggml_backend_buft_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    # bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t buft);
    "ggml_backend_buft_is_host": (ctypes.c_bool, [ctypes.c_void_p]),
    # ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void * ptr, size_t size);
    "ggml_backend_cpu_buffer_from_ptr": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
    # ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_get_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    # void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_free": (None, [ctypes.c_void_p]),
    # ggml_backend_reg_t ggml_backend_reg_by_name(const char * name);
    "ggml_backend_reg_by_name": (ctypes.c_void_p, [ctypes.c_char_p]),
    # const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
    "ggml_backend_reg_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    # void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
    "ggml_backend_reg_get_proc_address": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    # ggml_abort_callback_t ggml_set_abort_callback(ggml_abort_callback_t callback);
    "ggml_set_abort_callback": (ctypes.c_void_p, [ctypes.c_void_p]),
    # void ggml_backend_register(ggml_backend_reg_t reg);
    "ggml_backend_register": (None, [ctypes.c_void_p]),
}


@lru_cache(maxsize=1)
def ggml_library() -> SimpleNamespace | None:
    """ggml's functions about devices and their memory, or None where libggml cannot be found."""
    files = [file for name in ("ggml", "ggml-base") if (file := library_file(name))]
    if library_file("ggml") is None:
        return None
    # Windows looks into the named library only, not into those it links
    libraries = [ctypes.CDLL(os.fspath(file)) for file in files]
    found = SimpleNamespace()
    for name, (result, arguments) in _GGML_FUNCTIONS.items():
        function = next(f for library in libraries if (f := getattr(library, name, None)))
        function.restype = result
        function.argtypes = arguments
        setattr(found, name, function)
    return found


# enum ggml_backend_dev_type
DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


def devices() -> list[dict[str, Any]]:
    """Devices of the loaded backends: name, backend, description, type, free and total bytes, and
    unified_memory: whether a GPU works in the memory of the CPU."""
    load()
    ggml = ggml_library()
    found: list[dict[str, Any]] = []
    if ggml is None:
        return found
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        number = ggml.ggml_backend_dev_type(device)
        kind = DEVICE_TYPES.get(number, str(number))
        backend = ggml.ggml_backend_reg_name(ggml.ggml_backend_dev_backend_reg(device)).decode()
        found.append(
            {
                "name": ggml.ggml_backend_dev_name(device).decode(errors="replace"),
                "backend": backend,
                "description": ggml.ggml_backend_dev_description(device).decode(errors="replace"),
                "type": kind,
                "free_bytes": free.value,
                "total_bytes": total.value,
                "unified_memory": has_unified_memory(kind, backend, platform.machine()),
            }
        )
    return found


def has_unified_memory(kind: str, backend: str, machine: str) -> bool:
    """Whether a device of this type works in the memory of the CPU."""
    # ggml's Metal backend calls every GPU dedicated; all of Apple Silicon's are integrated
    return kind == "integrated GPU" or (kind == "GPU" and backend == "MTL" and machine == "arm64")


@lru_cache(maxsize=1)
def build_info() -> dict[str, Any]:
    """What the build wrote down: upstream commit, patch digest, options. Empty if unreadable."""
    for folder in (library_folder(), Path(__file__).parent):
        try:
            info = json.loads((folder / _BUILD_INFO).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(info, dict):
            return info
    return {}


def library_digest() -> str:
    """Short name of the native code, part of the key under which measurements are kept.

    Taken from size and modification time of each library file, which change with every build.
    """
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(library_folder().glob("*")):
        if file.is_file() and not file.name.endswith(".json"):
            status = file.stat()
            digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    if os.environ.get("KNAPSPEC_EDGE_KERNELS") == "0":
        digest.update(b"without our kernels;")  # other speeds, so other measurements
    return digest.hexdigest()[:16]


def library_info() -> dict[str, Any]:
    """What `doctor` shows. Raises LibraryError where the libraries cannot be loaded."""
    llama = load()
    build = build_info()
    return {
        "folder": os.fspath(library_folder()),
        "abi": llama._lib.knapspec_abi(),
        "digest": library_digest(),
        "build": build,
        "system_info": llama.llama_print_system_info().decode(errors="replace").strip(),
        "gpu_offload": bool(llama.llama_supports_gpu_offload()),
        "devices": devices(),
    }
