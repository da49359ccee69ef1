"""Explanation methods. A module added here registers its methods; nothing else is edited."""
