"""The certificate of an HTTPS server."""

from __future__ import annotations

import ssl

from moe_engine.errors import ConfigError


def check_certificate(keyfile: str | None, certfile: str | None) -> None:
    """Raises ConfigError: a file cannot be read, or key and certificate do not match."""
    if certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except ssl.SSLError as exc:
        words = (
            f"--ssl-certfile {certfile} --ssl-keyfile {keyfile}: not a certificate in PEM and its key without password"
        )
        raise ConfigError(f"{words}: {exc.reason or exc}") from None
    except OSError as exc:
        raise ConfigError(f"--ssl-certfile {certfile} --ssl-keyfile {keyfile}: {exc.strerror}") from None
