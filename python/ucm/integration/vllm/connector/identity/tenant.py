"""The documented import path of :class:`TenantTags`."""

from ucm.integration.vllm.connector.identity.keys import TenantTags as TenantTags
