"""Documents that are Python source: well known small functions and templated ones."""

from random import Random

from scripts.demo_model.corpus import words

KNOWN_SOURCE = '''def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
---
def factorial(n):
    """Return the product of the numbers from 1 to n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
---
def add(a, b):
    """Return the sum of a and b."""
    return a + b
---
def multiply(a, b):
    """Return the product of a and b."""
    return a * b
---
def is_even(n):
    """Return True if n is even."""
    return n % 2 == 0
---
def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True
---
def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a
---
def reverse_string(text):
    """Return the text backwards."""
    return text[::-1]
---
def is_palindrome(text):
    """Return True if the text reads the same backwards."""
    return text == text[::-1]
---
def count_vowels(text):
    """Return the number of vowels in the text."""
    return sum(1 for c in text.lower() if c in "aeiou")
---
def maximum(values):
    """Return the largest of the values."""
    result = values[0]
    for value in values[1:]:
        if value > result:
            result = value
    return result
---
def mean(values):
    """Return the mean of the values."""
    return sum(values) / len(values)
---
def fizzbuzz(n):
    """Return fizz, buzz, fizzbuzz or the number."""
    if n % 15 == 0:
        return "fizzbuzz"
    if n % 3 == 0:
        return "fizz"
    if n % 5 == 0:
        return "buzz"
    return str(n)
---
def celsius_to_fahrenheit(degrees):
    """Convert degrees Celsius to degrees Fahrenheit."""
    return degrees * 9 / 5 + 32
---
def bubble_sort(values):
    """Sort the list of values in place."""
    n = len(values)
    for i in range(n):
        for j in range(n - i - 1):
            if values[j] > values[j + 1]:
                values[j], values[j + 1] = values[j + 1], values[j]
    return values
---
def binary_search(values, target):
    """Return the index of the target in the sorted values, or -1."""
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == target:
            return middle
        if values[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
---
def flatten(rows):
    """Return the items of all rows in one list."""
    return [item for row in rows for item in row]
---
def read_lines(path):
    """Return the lines of the file at the path."""
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()
---
def greet(name):
    """Say hello."""
    print(f"Hello, {name}!")
---
def main():
    """Say hello to the world."""
    print("Hello, world!")


if __name__ == "__main__":
    main()'''
KNOWN = KNOWN_SOURCE.split("\n---\n")

COLLECTION_SOURCE = '''def find_NOUN(NOUNs, name):
    """Return the NOUN with the given name, or None."""
    for NOUN in NOUNs:
        if NOUN.name == name:
            return NOUN
    return None
---
def count_NOUNs(NOUNs):
    """Return the number of NOUNs."""
    return len(NOUNs)
---
def QUALITY_NOUNs(NOUNs):
    """Return the NOUNs that are QUALITY."""
    return [NOUN for NOUN in NOUNs if NOUN.QUALITY]
---
def total_price(NOUNs):
    """Return the price of all NOUNs together."""
    return sum(NOUN.price for NOUN in NOUNs)
---
def print_NOUNs(NOUNs):
    """Print every NOUN."""
    for NOUN in NOUNs:
        print(NOUN)'''
COLLECTIONS = COLLECTION_SOURCE.split("\n---\n")


def collection(rng: Random) -> str:
    """A function over a list of things."""
    noun, quality = rng.choice(words.THINGS), rng.choice(words.ADJECTIVES)
    return rng.choice(COLLECTIONS).replace("NOUN", noun).replace("QUALITY", quality)


def record_class(rng: Random) -> str:
    """A class with two or three attributes and a method."""
    noun = rng.choice(words.THINGS + words.ANIMALS)
    fields = rng.sample(
        ["name", "price", "age", "colour", "size", "weight", "owner"], rng.randint(1, 3)
    )
    assignments = "\n".join(f"        self.{field} = {field}" for field in fields)
    return (
        f'class {noun.capitalize()}:\n    """A {noun} with {" and ".join(fields)}."""\n\n'
        f"    def __init__(self, {', '.join(fields)}):\n{assignments}\n\n"
        f'    def __str__(self):\n        return f"{noun} {{self.{fields[0]}}}"'
    )


def program(rng: Random) -> str:
    """A file with one to three definitions."""
    parts = [rng.choice(KNOWN[:-1]) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
    while not parts or rng.random() < 0.3:
        parts.append(collection(rng) if rng.random() < 0.7 else record_class(rng))
    if rng.random() < 0.1:
        parts.append(KNOWN[-1])
    rng.shuffle(parts)
    text = "\n\n\n".join(parts)
    return text + "\n" if rng.random() < 0.8 else text


def known_program(rng: Random) -> str:
    """One well known function alone."""
    return rng.choice(KNOWN) + "\n"
