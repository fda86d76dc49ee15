"""Text on top of token ids: chat templates, streaming detokenisation, stop strings.

Nothing here decodes; the decoding loop below knows token ids only.
"""
