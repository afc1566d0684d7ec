"""Certificates of an authority of the tests' own, as files, and the clients that trust it."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import trustme


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *identities: str, days: float = 30) -> tuple[Path, Path]:
        """Write `name`.crt and `name`.key, valid for `days` from now; a negative number makes them expired."""
        ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
        starts = min(ends, dt.datetime.now(dt.UTC)) - dt.timedelta(days=60)
        issued = self._ca.issue_cert(*identities, not_before=starts, not_after=ends, key_type=trustme.KeyType.ECDSA)
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def client(self, pair: tuple[Path, Path] | None = None, **versions: ssl.TLSVersion) -> ssl.SSLContext:
        """Return a client that trusts this authority, and shows the certificate of `pair`."""
        context = ssl.create_default_context(cafile=self.file)
        for name, version in versions.items():
            setattr(context, name, version)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context
