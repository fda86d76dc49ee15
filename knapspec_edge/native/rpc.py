"""Devices of other processes or machines, through llama.cpp's RPC backend.

A build with GGML_RPC offers them. The servers have no protection of their own: name only those in a
network you trust.
"""

from __future__ import annotations

import ctypes
import os
import socket
from types import SimpleNamespace

from ..errors import LibraryError

# host:port of each server, separated by commas
SERVERS = "KNAPSPEC_EDGE_RPC_SERVERS"

_CONNECT_SECONDS = 5.0


def named_servers(text: str) -> list[str]:
    """The endpoints in a comma-separated list. Raises LibraryError for one that is no host:port."""
    endpoints = [word for part in text.split(",") if (word := part.strip())]
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise LibraryError(f"--rpc ({SERVERS}): {ascii(endpoint)} is not host:port")
    return endpoints


def servers() -> list[str]:
    """Those in the environment. Raises LibraryError."""
    return list(dict.fromkeys(named_servers(os.environ.get(SERVERS, ""))))


def add_servers(ggml: SimpleNamespace) -> None:
    """Register the devices of all servers in the environment, before a model is loaded.

    Raises LibraryError if one does not answer, or if the build has no RPC backend.
    """
    endpoints = servers()
    if not endpoints:
        return
    backend = ggml.ggml_backend_reg_by_name(b"RPC")
    if not backend:
        raise LibraryError(
            f"--rpc ({SERVERS}) cannot be honoured: this build has no RPC backend; build it with "
            'CMAKE_ARGS="-DGGML_RPC=on"'
        )
    address = ggml.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
    # ggml_backend_reg_t ggml_backend_rpc_add_server(const char * endpoint);
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    for endpoint in endpoints:
        _require_answer(endpoint)
        registry = add_server(endpoint.encode())
        if not registry:
            raise LibraryError(f"the RPC server {endpoint} offers no device")
        ggml.ggml_backend_register(registry)


def _require_answer(endpoint: str) -> None:
    # ggml ends the process where it cannot connect
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise LibraryError(f"the RPC server {endpoint} does not answer: {error}") from None
