"""Keys that encrypt secrets in tests' databases."""

import base64

from gateway.accounts.webhooks.secret_box import SecretBox

ENCRYPTION_KEY, OTHER_ENCRYPTION_KEY = (
    base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)
)
BOX = SecretBox([ENCRYPTION_KEY])
