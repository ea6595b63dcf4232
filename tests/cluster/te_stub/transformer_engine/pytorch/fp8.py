from contextlib import nullcontext


def fp8_autocast(*args, **kwargs):
    return nullcontext()


def fp8_model_init(*args, **kwargs):
    return nullcontext()


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False

    @staticmethod
    def reset(): ...
