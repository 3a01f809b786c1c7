"""vLLM's `exceptions`, each the class of Quire that is raised where vLLM raises it."""

from __future__ import annotations

from quire.errors import QuireClientError as VLLMClientError
from quire.errors import QuireError as VLLMError
from quire.errors import QuireServerError as VLLMServerError
from quire.errors import ValidationError as VLLMValidationError

__all__ = ["VLLMClientError", "VLLMError", "VLLMServerError", "VLLMValidationError"]
