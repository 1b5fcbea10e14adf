def tables():
    return ""
