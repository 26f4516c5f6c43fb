"""Serves a resources server that nemo-gym brings: ``python serve_example.py NAME PORT``. Started by a test."""

from __future__ import annotations

import importlib
import inspect
import sys

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

name, port = sys.argv[1], int(sys.argv[2])
module = importlib.import_module(f"resources_servers.{name}.app")
own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
(config_class,) = [c for c in own if issubclass(c, BaseResourcesServerConfig)]
(server_class,) = [c for c in own if issubclass(c, SimpleResourcesServer)]
config = config_class(host="127.0.0.1", port=port, entrypoint="app.py", name=name)
client = ServerClient.model_construct()  # of other servers; these three use none
server = server_class(config=config, server_client=client)
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")
