"""Google Cloud Storage: where requests go, and with which credentials.

``STORAGE_EMULATOR_HOST`` names an emulator, as for Google's own libraries. It gets no credentials.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

from convert.stores.errors import StoreError, missing_extra

URL = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_ADVICE = "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"


@dataclass(frozen=True)
class Google:
    """Where requests go, and with which credentials.

    Attributes:
        endpoint: a URL.
        credentials: google-auth's; None where there are none: requests are not signed, as public buckets need none.
    """

    endpoint: str
    credentials: Any
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def obstore(self) -> dict[str, Any]:
        """Return the settings of obstore's store."""
        if self.credentials is None:
            return {"base_url": self.endpoint, "skip_signature": True}
        return {"base_url": self.endpoint, "credential_provider": self._provided}

    def _provided(self) -> dict[str, Any]:
        token, expiry = self.token(), self.credentials.expiry
        return {"token": token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    def token(self) -> str:
        """Return a token that is valid now.

        Raises:
            StoreError: Google does not accept the credentials, or does not answer.
        """
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.urllib3 import Request

        with self._lock:
            try:
                if not self.credentials.valid:
                    self.credentials.refresh(Request(_pool()))
            except GoogleAuthError as error:
                problem = f"there is no token for these credentials ({type(error).__name__})"
                raise StoreError(problem, "gs://", _ADVICE) from None
            return str(self.credentials.token)


def google() -> Google:
    """Find the endpoint and Google's application default credentials.

    Raises:
        StoreError: the credentials cannot be read or give no token, or a package is missing.
    """
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint  # TensorStore has no other setting for it
        return Google(endpoint, None)
    found = Google(URL, _credentials())
    if found.credentials is not None:
        found.token()  # a clear error at once
    return found


def _credentials() -> Any:
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
    except ImportError:
        raise missing_extra("gs", "google-auth", "remote", "gs://") from None
    logging.getLogger("google.auth").addHandler(
        logging.NullHandler()
    )  # it warns that there is no project; none is needed
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about the same
            return google.auth.default(scopes=[_SCOPE])[0]
    except DefaultCredentialsError as error:
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            problem = "GOOGLE_APPLICATION_CREDENTIALS names a file that has no credentials"
            raise StoreError(problem, file, _ADVICE) from error
        return None


@functools.cache
def _pool() -> Any:
    import urllib3

    return urllib3.PoolManager()
