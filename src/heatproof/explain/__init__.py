"""Explanation methods. A new module in this package registers its methods without further edits."""
