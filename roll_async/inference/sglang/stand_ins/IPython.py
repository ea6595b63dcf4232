"""SGLang imports what it shows notebooks with, two names of `IPython.display`; nothing of it is called here. Ray asks
whether it runs in a notebook.
"""

import sys

HTML = display = None
sys.modules[f"{__name__}.display"] = sys.modules[__name__]


def get_ipython() -> None:
    return None
