"""Templates, the stylesheet and the script; what a browser may do with a page of ours."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

_KINDS: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
# Nothing but what comes from here by its name: no script or style in a page, no other host, no
# frame, no form to elsewhere. So a title that got past the escaping would still be nothing. Of
# strings a script makes HTML in one place alone, page.js's policy `page` (Trusted Types).
_PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types page"
    ),
    # With no-referrer a browser would say with our own forms that they are from nowhere.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_A_YEAR: Final = "public, max-age=31536000, immutable"

FILE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
"""Of what came from a document: wherever it is opened it is nobody's page and runs nothing."""


class Rendering:
    """All of it in memory, read once: what is served is no path that somebody sent."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("daemon.gateway.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        folder = files("daemon.gateway.pages") / "static"
        self._files = {name: (folder / name).read_bytes() for name in _KINDS}
        digest = hashlib.sha256(b"".join(self._files.values())).hexdigest()[:12]
        self.folder = f"/static/{digest}"  # another one where a file has changed
        self._templates.globals["static"] = self.folder
        for name in self._templates.list_templates():
            self._templates.get_template(name)  # a mistake is found at the start

    def page(self, template: str, status: int, **told: Any) -> HTMLResponse:
        """A page."""
        text = self._templates.get_template(template).render(**told)
        return HTMLResponse(text, status, headers=_PAGE_HEADERS)

    def file(self, name: str) -> Response | None:
        """The stylesheet, the script or the icon; None: there is no such file."""
        if name not in self._files:
            return None
        headers = {"cache-control": _A_YEAR, "cross-origin-resource-policy": "same-origin"}
        return Response(self._files[name], media_type=_KINDS[name], headers=headers)
