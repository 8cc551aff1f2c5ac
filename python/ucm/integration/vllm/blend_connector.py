"""The connector of Blend, by the name users of the original import."""

from ucm.integration.vllm.connector import UCMBlendConnector as UCMBlendConnector
