"""The health check at /healthz: this process answers.

It asks no database, since a database outage must not make a supervisor kill the web tier. It stands before every other
middleware, since a load balancer asks by address and without TLS, which the others rightly refuse.
"""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase


def answer_health_checks(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    def middleware(request: HttpRequest) -> HttpResponseBase:
        if request.path == "/healthz":
            return HttpResponse("ok\n", content_type="text/plain")
        return get_response(request)

    return middleware
