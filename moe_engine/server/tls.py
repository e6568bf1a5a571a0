"""The certificate of an HTTPS server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from moe_engine.config.server import ServerArgs
from moe_engine.errors import ConfigError


@dataclass(frozen=True)
class Certificate:
    """Files in PEM, and the password of an encrypted key."""

    certfile: str
    keyfile: str | None
    password: str | None = None

    @classmethod
    def of(cls, flags: ServerArgs) -> Certificate | None:
        """None: the server has no TLS."""
        if flags.ssl_certfile is None:
            return None
        return cls(flags.ssl_certfile, flags.ssl_keyfile, flags.ssl_keyfile_password)

    def check(self) -> None:
        """Raises ConfigError: a file cannot be read, or key, password and certificate do not match."""
        given = f"--ssl-certfile {self.certfile} --ssl-keyfile {self.keyfile}"
        try:
            # An empty password: without one, OpenSSL would ask at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, self.password or "")
        except ssl.SSLError as exc:
            key = "its key without password" if self.password is None else "its key with the --ssl-keyfile-password"
            raise ConfigError(f"{given}: not a certificate in PEM and {key}: {exc.reason or exc}") from None
        except OSError as exc:
            raise ConfigError(f"{given}: {exc.strerror}") from None
