"""Images for a tiny vision model."""

import base64
import io

from PIL import Image

AROUND_IMAGE = 3
"""Tokens that the model puts around those of an image."""


def picture(color: str, kind: str = "jpeg") -> str:
    """Return an image of one color as a data URI."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
