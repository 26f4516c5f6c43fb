"""The address of a server, and access to it."""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.errors import ConfigError


@dataclass(frozen=True)
class Access:
    """``token``: None if everybody on this machine has access. It is not shown."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    variable: str | None = None
    """The environment variable that holds the token."""

    @classmethod
    def checked(cls, host: str, port: int, token_env: str | None) -> Access:
        """Raises ConfigError: an invalid port, a token variable that is not set, or no token although other machines
        can reach the server."""
        if not 0 <= port < 2**16:
            raise ConfigError(f"--port {port} is not a port; ports are 0 (any free one) to {2**16 - 1}.")
        if token_env is None:
            if not _here_only(host):
                raise ConfigError(
                    f"--host {host} can be reached from other machines, so clients must send a token. Put one into an "
                    "environment variable and name it: --token-env NAME. Without --host the server is for this machine "
                    "only."
                )
            return cls(host, port)
        token = os.environ.get(token_env)
        if not token:
            raise ConfigError(
                f"--token-env {token_env}: this environment variable is not set. Export it, or omit the flag on a "
                "loopback address."
            )
        return cls(host, port, token, token_env)

    def cannot_listen(self, error: OSError) -> ConfigError:
        """The error for an address that cannot be used."""
        reason = error.strerror or error
        return ConfigError(f"cannot listen on {self.host} port {self.port}: {reason}. Name another --port (0: any)")

    def url(self, port: int) -> str:
        """The address of the server. ``port``: port of its socket, because :attr:`port` may be 0."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def allows(self, authorization: str | None) -> bool:
        """Whether the header ``Authorization`` of a request shows the token."""
        if self.token is None:
            return True
        header = (authorization or "").encode(errors="surrogateescape")  # a header may hold any bytes
        return hmac.compare_digest(header, f"Bearer {self.token}".encode(errors="surrogateescape"))

    def refuses_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from a web page and the server has no token. A page of any site can send requests to
        servers on the machine of its reader. Browsers then add the header ``Origin``; programs do not."""
        return self.token is None and "Origin" in headers

    def hide(self) -> None:
        """Remove the token from the environment, so that worker processes of rewards do not inherit it."""
        if self.variable is not None:
            os.environ.pop(self.variable, None)


PAGE = "requests of web pages (with the header Origin) need a token: start the server with --token-env"
"""The answer if :meth:`Access.refuses_page`."""


def add_access(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the flags of a command that serves. ``port``: the default port."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=port, help="0: any free port (default: %(default)s)")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the clients' token")


def _here_only(host: str) -> bool:
    """Whether only this machine can reach the address. This is not known for names other than localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
