def cast_master_weights_to_fp8(*args, **kwargs):
    raise NotImplementedError


def replace_raw_data(*args, **kwargs):
    raise NotImplementedError


def post_all_gather_processing(*args, **kwargs):
    raise NotImplementedError
