def check_rules(config, root):
    return []
