"""SGLang's kernels are compiled for CUDA only. On CPU it imports their names and takes its paths in plain torch."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version")

    return missing
