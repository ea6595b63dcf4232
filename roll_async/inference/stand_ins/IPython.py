"""SGLang imports what it shows notebooks with, two names of `IPython.display`; nothing of it is called here."""

import sys

HTML = display = None
sys.modules[f"{__name__}.display"] = sys.modules[__name__]
