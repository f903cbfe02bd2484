"""How a pod reaches the API server of its cluster: address, certificate and token of its service account."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_TOKEN_BYTES = 64 * 1024


@dataclass(frozen=True)
class KubernetesAccess:
    """`url` is the API server's base. `token_file` is read anew for every request: the cluster replaces it hourly.
    Without `ca_file` the system's certificates are trusted."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> KubernetesAccess:
        """Return what every pod is given. Raises ConfigError outside of a cluster."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        token_file = account / "token"
        if not host or not token_file.exists():
            raise ConfigError(
                "The registry k8s: works inside of a Kubernetes pod only: there is no service account here.",
                hint="Leave automountServiceAccountToken on, or use another registry.",
            )
        ca_file = account / "ca.crt"
        shown_host = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown_host}:{port}", token_file, ca_file if ca_file.exists() else None)

    def headers(self) -> dict[str, str]:
        """Return the headers of a request. Raises OSError when the token cannot be read."""
        headers = {"Accept": "application/json"}
        if self.token_file is not None:
            with self.token_file.open("rb") as file:
                token = file.read(MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def tls(self) -> ssl.SSLContext | bool:
        """Return what an HTTP client needs to check the server."""
        return True if self.ca_file is None else ssl.create_default_context(cafile=str(self.ca_file))
