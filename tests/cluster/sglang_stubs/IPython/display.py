"""Two names that SGLang imports."""

HTML = display = None
