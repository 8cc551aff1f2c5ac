"""The vLLM connector: ``UCMConnector`` picks the configured mode, ``UCMDirectConnector`` names the direct one."""

import os

from ucm.integration.vllm.connector.connector import UCMConnector, UCMDirectConnector
from ucm.integration.vllm.connector.device import cores_here, keep_a_core

keep_a_core(cores_here(), os.environ)  # vLLM asks for the class before it starts a rank

__all__ = ["UCMConnector", "UCMDirectConnector"]
