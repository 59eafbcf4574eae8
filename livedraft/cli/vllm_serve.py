"""`livedraft vllm serve`: the public server of a fleet, from settings to its end."""

from __future__ import annotations

from dataclasses import replace

from livedraft.cli.serve import listen
from livedraft.config import VllmConfig
from livedraft.integrations.vllm.app import VllmServer, create_app
from livedraft.integrations.vllm.launch import free_port
from livedraft.integrations.vllm.service import VllmService
from livedraft.settings import Settings


def run(settings: Settings, config: VllmConfig, *, is_verbose: bool) -> None:
    """Until SIGTERM or SIGINT. Raises UserError when vLLM does not start or the address is taken."""
    if settings.server.port == 0:  # replicas have to know it before it is listened on
        settings = replace(settings, server=replace(settings.server, port=free_port()))
    host = "127.0.0.1" if settings.server.host in ("0.0.0.0", "::") else settings.server.host
    server = VllmServer(VllmService(settings, config, url=f"http://{host}:{settings.server.port}"))
    listen(create_app(server), server, is_verbose=is_verbose)
