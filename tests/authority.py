"""A throw-away authority, for what speaks TLS in tests and benchmarks. It needs the program `openssl`."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")


class Authority:
    """A throw-away authority, and the certificates that it signs."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self._openssl("req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")

    def sign(self, name: str) -> tuple[str, str]:
        """Return the files of a new certificate for this machine, and of its key."""
        (self.directory / "names").write_text("subjectAltName=IP:127.0.0.1")
        self._openssl("req", *self._new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
        return str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key")

    def serving(self, name: str = "server") -> ssl.SSLContext:
        """Return a server's context, with a new certificate for this machine."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.sign(name))
        return context

    def _new_key(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        return [*curve, "-nodes", "-keyout", f"{name}.key"]

    def _openssl(self, *arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *arguments], cwd=self.directory, check=True, capture_output=True)
