"""The primitives that secrets rest on give their standards' answers, in the calls that are used here."""

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtrain.secagg.masking import TAG_BYTES, keystream

hexed = bytes.fromhex


@pytest.mark.parametrize(
    ("scalar", "point", "product"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_rfc_7748_x25519_of_a_scalar_and_a_point(scalar, point, product):
    private = X25519PrivateKey.from_private_bytes(hexed(scalar))
    assert private.exchange(X25519PublicKey.from_public_bytes(hexed(point))).hex() == product


@pytest.mark.parametrize(
    ("times", "result"),
    [
        (1, "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"),
        (1000, "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"),
    ],
)
def test_rfc_7748_x25519_iterated(times, result):
    k = u = (9).to_bytes(32, "little")
    for _ in range(times):
        shared = X25519PrivateKey.from_private_bytes(k).exchange(X25519PublicKey.from_public_bytes(u))
        k, u = shared, k
    assert k.hex() == result


@pytest.mark.parametrize(
    ("secret", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
            "d25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
            "387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
            "4a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
)
def test_rfc_8032_ed25519(secret, public, message, signature):
    private = Ed25519PrivateKey.from_private_bytes(hexed(secret))
    assert private.public_key().public_bytes_raw().hex() == public
    assert private.sign(hexed(message)).hex() == signature
    private.public_key().verify(hexed(signature), hexed(message))
    with pytest.raises(InvalidSignature):
        private.public_key().verify(hexed(signature), hexed(message) + b"!")


@pytest.mark.parametrize(
    ("salt", "info", "keys"),
    [
        (
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (None, "", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
    ],
)
def test_rfc_5869_hkdf_sha256(salt, info, keys):
    salt = hexed(salt) if salt else None
    derived = HKDF(algorithm=hashes.SHA256(), length=42, salt=salt, info=hexed(info)).derive(b"\x0b" * 22)
    assert derived.hex() == keys


PLAIN = (
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
SEALED = (
    "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
)


def test_sp_800_38a_aes_128_in_counter_mode_when_its_counter_is_set_again():
    key, counter = hexed("2b7e151628aed2a6abf7158809cf4f3c"), bytes(range(0xF0, 0x100))
    cipher = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
    out = np.zeros(80, np.uint8)
    for _ in range(2):
        cipher.reset_nonce(counter)
        cipher.update_into(hexed(PLAIN), out.data)
        assert bytes(out[:64]).hex() == SEALED


def test_gcm_of_zeros_under_the_key_zero():
    """Test case 2 of the submission of GCM to NIST (McGrew and Viega 2004)."""
    out = np.zeros(32, np.uint8)
    AESGCM(bytes(16)).encrypt_into(bytes(12), bytes(16), None, out.data)
    assert bytes(out).hex() == "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"


def test_the_stream_of_the_key_zero_begins_as_that_ciphertext():
    out = np.zeros(16 + TAG_BYTES, np.uint8)
    keystream(bytes(16), 0, out, 16)
    assert bytes(out[:16]).hex() == "0388dace60b6a392f328c2b971b2fe78"
