"""Names only: nothing here runs in fp8."""


class Recipe: ...


class Format:
    HYBRID, E4M3 = "hybrid", "e4m3"


class DelayedScaling(Recipe): ...


class Float8CurrentScaling(Recipe): ...


class Float8BlockScaling(Recipe): ...


class MXFP8BlockScaling(Recipe): ...


class NVFP4BlockScaling(Recipe): ...
