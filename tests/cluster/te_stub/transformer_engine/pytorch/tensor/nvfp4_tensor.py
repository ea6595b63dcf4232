from . import QuantizedTensor


class NVFP4Tensor(QuantizedTensor): ...
