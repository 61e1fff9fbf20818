"""HTTP requests of the command line, past the proxy of the environment where only this machine can answer."""

import http.client
import urllib.request
from urllib.parse import urlsplit

from areal_lora.network.addresses import on_loopback


def open_url(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """As ``urllib.request.urlopen``. ``http_proxy`` is not used for loopback: it would get the key, and not answer."""
    proxies: dict[str, str] | None = {} if on_loopback(urlsplit(request.full_url).hostname or "") else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer
