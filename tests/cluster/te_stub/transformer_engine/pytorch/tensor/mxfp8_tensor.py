from . import QuantizedTensor


class MXFP8Tensor(QuantizedTensor): ...
