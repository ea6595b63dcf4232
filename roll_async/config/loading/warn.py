def find_warnings(config, root):
    return []
