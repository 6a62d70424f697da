#include "check.h"

#include "base/hmac.h"

static void check_hex(const uint8_t digest[SHA256_SIZE], const char *hex)
{
    char text[2 * SHA256_SIZE + 1];
    for (int i = 0; i < SHA256_SIZE; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    CHECK_STR_EQ(text, hex);
}

// FIPS 180-4 examples (NIST, "SHA-256 examples" and the empty message).
TEST(sha256_of_the_standards_messages)
{
    static const struct { const char *message, *digest; } vectors[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint8_t digest[SHA256_SIZE];
        sha256(digest, vectors[i].message, strlen(vectors[i].message));
        check_hex(digest, vectors[i].digest);
    }
}

TEST(sha256_of_a_million_a)
{
    enum { COUNT = 1000000 };
    char *message = malloc(COUNT);
    CHECK(message);
    memset(message, 'a', COUNT);
    uint8_t digest[SHA256_SIZE];
    sha256(digest, message, COUNT);
    free(message);
    check_hex(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// From 56 bytes on, the padding needs a second block. Expected: Python's
//     hashlib.sha256(b"".join(hashlib.sha256(bytes(range(n))).digest() for n in range(200))).hexdigest()
TEST(sha256_of_every_length_around_a_block)
{
    uint8_t message[200], digests[200 * SHA256_SIZE], digest[SHA256_SIZE];
    for (int n = 0; n < 200; n++) {
        message[n] = (uint8_t)n;
        sha256(digests + n * SHA256_SIZE, message, n);
    }
    sha256(digest, digests, sizeof digests);
    check_hex(digest, "ba7b0fcea7d10c06b855b43d2b4dce1e3e842fff6be0acefb0faf4f2dd05bb47");
}

// RFC 4231, section 4. Case 5 is truncated to 128 bits there.
TEST(hmac_of_rfc4231)
{
    uint8_t key[131], data[152], digest[SHA256_SIZE];

    memset(key, 0x0b, 20);
    hmac_sha256(digest, key, 20, "Hi There", 8);
    check_hex(digest, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");

    hmac_sha256(digest, "Jefe", 4, "what do ya want for nothing?", 28);
    check_hex(digest, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");

    memset(key, 0xaa, 20);
    memset(data, 0xdd, 50);
    hmac_sha256(digest, key, 20, data, 50);
    check_hex(digest, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");

    for (int i = 0; i < 25; i++)
        key[i] = (uint8_t)(i + 1);
    memset(data, 0xcd, 50);
    hmac_sha256(digest, key, 25, data, 50);
    check_hex(digest, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");

    memset(key, 0x0c, 20);
    hmac_sha256(digest, key, 20, "Test With Truncation", 20);
    uint8_t truncated[16] = {0xa3, 0xb6, 0x16, 0x74, 0x73, 0x10, 0x0e, 0xe0,
                             0x6e, 0x0c, 0x79, 0x6c, 0x29, 0x55, 0x55, 0x2b};
    CHECK_MEM_EQ(digest, truncated, sizeof truncated);

    memset(key, 0xaa, 131);
    const char *six = "Test Using Larger Than Block-Size Key - Hash Key First";
    hmac_sha256(digest, key, 131, six, strlen(six));
    check_hex(digest, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");

    const char *seven = "This is a test using a larger than block-size key and a larger than block-size data. "
                        "The key needs to be hashed before being used by the HMAC algorithm.";
    hmac_sha256(digest, key, 131, seven, strlen(seven));
    check_hex(digest, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(hmac_of_nothing)
{
    uint8_t digest[SHA256_SIZE];
    hmac_sha256(digest, NULL, 0, NULL, 0);
    check_hex(digest, "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}
